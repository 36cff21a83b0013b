"""Attention masks, cut to the tokens of one segment."""

from __future__ import annotations

import mlx.core as mx

from kvcompress.errors import ConfigError

Mask = mx.array | str | None


def check_mask(mask: Mask, queries: int, tokens: int) -> None:
    """Refuse a mask that does not fit, which MLX would apply without a word.

    Raises:
        ConfigError: For an unknown string, a causal mask over fewer tokens than queries, or an
            array whose last two axes do not broadcast to ``(queries, tokens)``.
    """
    if mask is None:
        return
    if isinstance(mask, str):
        if mask != "causal":
            raise ConfigError(f"attention: mask must be None, 'causal' or an array (got {mask!r})")
        if tokens < queries:
            raise ConfigError(
                f"attention: a causal mask needs at least as many tokens as queries "
                f"(got {tokens} tokens, {queries} queries)"
            )
        return
    shape = mask.shape
    if shape[-1] != tokens or (len(shape) > 1 and shape[-2] not in (1, queries)):
        raise ConfigError(
            f"attention: mask must end in ({queries}, {tokens}) or (1, {tokens}) "
            f"(got {tuple(shape)})"
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
