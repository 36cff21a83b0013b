"""Attention masks, cut to the tokens of one segment."""

from __future__ import annotations

import mlx.core as mx

from kvcompress.config.option import shown
from kvcompress.errors import ConfigError

Mask = mx.array | str | None


def check_mask(mask: Mask, queries: tuple[int, ...], tokens: int) -> None:
    """Refuse a mask that does not fit, which MLX would apply without a word or refuse in its own.

    Args:
        mask: What was given.
        queries: Shape of the queries, ``(B, Hq, L, ...)``.
        tokens: Number of tokens in all, ``T``.

    Raises:
        ConfigError: For an unknown string, a causal mask over fewer tokens than queries, or what
            is no array of bools or real numbers that broadcasts to ``(B, Hq, L, T)``; the last
            axis must be there in full.
    """
    if mask is None:
        return
    length = queries[2]
    if isinstance(mask, str) and mask == "causal":
        if tokens < length:
            raise ConfigError(
                f"attention: a causal mask needs at least as many tokens as queries "
                f"(got {tokens} tokens, {length} queries)"
            )
        return
    if not isinstance(mask, mx.array):
        raise ConfigError(f"attention: mask must be None, 'causal' or an array (got {shown(mask)})")
    if mask.dtype == mx.complex64:
        raise ConfigError("attention: mask must be of bools or real numbers (got complex64)")
    shape, legal = mask.shape, (*queries[:3], tokens)
    fits = 1 <= len(shape) <= 4 and shape[-1] == tokens
    if not fits or any(n not in (1, m) for n, m in zip(shape[::-1], legal[::-1], strict=False)):
        raise ConfigError(
            f"attention: mask must end in ({length}, {tokens}) or (1, {tokens}) and broadcast to "
            f"{legal} (got {tuple(shape)})"
        )


def as_mlx_takes_it(mask: Mask, dtype: mx.Dtype) -> Mask:
    """An additive mask of another float type, which MLX's own attention refuses, in ``dtype``."""
    if isinstance(mask, mx.array) and mx.issubdtype(mask.dtype, mx.floating):
        return mask.astype(dtype)
    return mask


def segment_mask(
    mask: Mask, spans: tuple[range, ...], queries: int, tokens: int
) -> mx.array | None:
    """The columns of ``mask`` that belong to a segment; ``None`` where nothing is hidden.

    Args:
        mask: ``None``, ``"causal"`` (aligned to the lower right), or an array whose last axis
            runs over all ``tokens``.
        spans: The places of the segment's tokens in the order of the sequence.
        queries: Number of query positions, ``L``.
        tokens: Number of tokens in all, ``T``.

    Returns:
        A bool or additive array that broadcasts to ``(..., L, n)``, or ``None``.
    """
    if mask is None:
        return None
    if isinstance(mask, str):
        first = tokens - queries  # place of the first query
        if all(span.stop <= first + 1 for span in spans):
            return None
        places = mx.concatenate([mx.arange(span.start, span.stop) for span in spans])
        return mx.arange(first, tokens)[:, None] >= places[None]
    parts = [mask[..., span.start : span.stop] for span in spans]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def apply_mask(scores: mx.array, mask: mx.array | None) -> mx.array:
    """Hide tokens: ``(B, Hkv, G, L, n)`` float32 scores and a mask over ``(..., L, n)``.

    A hidden score is the lowest finite number, as in MLX, so that a row which is hidden
    throughout gives finite weights.
    """
    if mask is None:
        return scores
    lowest = mx.finfo(mx.float32).min
    Hkv, G = scores.shape[1:3]
    if mask.ndim == 4:
        heads = mask.shape[1]
        if heads == Hkv * G:
            mask = mask.reshape(mask.shape[0], Hkv, G, *mask.shape[2:])
        else:
            mask = mask[:, :, None]
    elif mask.ndim == 3:  # (heads, L, n) broadcasts against (B, Hq, L, n)
        mask = mask.reshape(1, Hkv, G, *mask.shape[1:]) if mask.shape[0] != 1 else mask
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, lowest)
    return mx.maximum(scores + mask.astype(mx.float32), lowest)
