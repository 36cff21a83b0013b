"""What a list of caches holds, counted in three ways that must agree."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from kvcompress.compare.metrics import Measures

_SHARED = ("codec", "method", "layer")
"""Attributes of a cache under which lies what all sequences of a method share."""


def active_bytes() -> int:
    """Bytes that MLX has in use now, once garbage is gone."""
    gc.collect()
    mx.synchronize()
    return int(mx.get_active_memory())


def walked_bytes(caches: Sequence[Any], model: Any) -> tuple[int, int]:
    """Bytes of the distinct arrays that can be reached from caches of any kind.

    Args:
        caches: The model's list of caches.
        model: The model, whose own weights do not count.

    Returns:
        Bytes of this sequence alone, and bytes of tables that sequences share.
    """
    from kvcompress.cache.nested import leaves
    from kvcompress.cache.walk import reachable_arrays

    weights = _ids(reachable_arrays([model]))
    shared = [getattr(cache, name, None) for cache in leaves(caches) for name in _SHARED]
    tables = [array for array in reachable_arrays(shared) if id(array) not in weights]
    aside = weights | _ids(tables)
    own = [array for array in reachable_arrays(caches) if id(array) not in aside]
    return _bytes(own), _bytes(tables)


def memory_measures(caches: Sequence[Any], model: Any, tokens: int) -> Measures:
    """What caches hold, against a float16 cache of the same tokens.

    Args:
        caches: The model's list of caches, with everything they keep computed.
        model: The model.
        tokens: Tokens that the caches have seen.
    """
    from kvcompress.cache import report

    resident, tables = walked_bytes(caches, model)
    values = plain_values(model, tokens)
    counted = report(caches)
    coded = counted.coded_values > 0
    return {
        "tokens": tokens,
        "tokens_exact": counted.tokens_exact,
        "resident_bytes": resident,
        "reported_bytes": counted.resident_bytes + counted.plain_bytes,
        "predicted_bytes": counted.predicted_bytes + counted.plain_bytes,
        "reserved_bytes": counted.reserved_bytes,
        "table_bytes": tables,
        "fp16_bytes": 2 * values,
        "bits_per_value": 8 * resident / values,
        "times_smaller": 2 * values / resident,
        "coded_bits_per_value": 16 / counted.compression_ratio if coded else None,
        "payload_bits_per_value": counted.assigned_avg_bits if coded else None,
    }


def held(caches: Sequence[Any]) -> Iterator[mx.array]:
    """What mlx-lm's own caches hold of their tokens, without the room for tokens to come."""
    from mlx.utils import tree_flatten

    from kvcompress.cache.nested import leaves

    for cache in leaves(caches):
        offset = getattr(cache, "offset", None)
        for leaf in dict(tree_flatten(cache.state)).values():
            if not isinstance(leaf, mx.array):
                continue
            grows = isinstance(offset, int) and leaf.ndim == 4  # (B, heads, tokens, channels)
            yield leaf[:, :, :offset] if grows else leaf


def plain_values(model: Any, tokens: int) -> int:
    """Numbers that the model's own caches keep for ``tokens`` tokens.

    This is what "a float16 cache of the same tokens" stores: keys and values of layers that keep
    everything, and whatever sliding or recurrent layers keep. The model runs unevaluated.
    """
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    feed_unevaluated(model, caches, tokens)
    return sum(array.size for array in held(caches))


def feed_unevaluated(model: Any, caches: Sequence[Any], tokens: int) -> None:
    """Give caches ``tokens`` tokens of which only shapes are known; nothing is computed.

    The last token comes alone: that is when a sliding cache drops what left its window.
    """
    for length in (tokens - 1, 1):
        if length:
            model(mx.zeros((1, length), mx.int32), cache=caches)


def _ids(arrays: Iterable[mx.array]) -> set[int]:
    return {id(array) for array in arrays}


def _bytes(arrays: Iterable[mx.array]) -> int:
    return sum(int(array.nbytes) for array in arrays)
