"""How far attention's scores through a cache are from those of the keys themselves."""

from __future__ import annotations

from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcompress.cache.binding import bound
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.view import View
from kvcompress.codec import Codes
from kvcompress.compare.metrics import finite
from kvcompress.compare.score_cases import RECENT, Case
from kvcompress.errors import ConfigError
from kvcompress.method import CompressionMethod

Array = NDArray[np.float64]

AGE: Final = "age "
"""Begins the names of errors by age; the least age of the tokens follows."""


def score_errors(method: CompressionMethod, case: Case) -> dict[str, float]:
    """Read a case through the method's cache; mean squared errors of what its queries score.

    Args:
        method: The method with its calibration.
        case: The tokens.

    Returns:
        ``all``, ``recent``, ``older``: of the scores ``q . k / sqrt(D)`` of all tokens, the last
        16 and the others, against un-quantised keys with exact RoPE. ``exact_rope``: of all, were
        the same codes decoded and rotated to their true positions. ``key_error``: mean squared
        error of a channel of the coded keys. ``coded``: how many keys are codes. ``age 16``, ``age
        32`` and so on: of the scores of tokens at least so many steps back, and less than twice as
        many.

    Raises:
        ConfigError: The method keeps every token exact.
        KVCompressError: It cannot serve the layer.
    """
    layer, total = case.layer, case.keys.shape[2]
    first = total - case.queries.shape[2]
    cache = CompressedKVCache(method, layer, bound(method, layer))
    _prefill(cache, case, first)
    coded = _coded_span(cache)
    if not coded:
        raise ConfigError(f"{method.name}: of {total} tokens none is coded, so there is no error")
    queries = case.queries.astype(mx.float32) * layer.head_dim**-0.5
    rows = queries.reshape(1, layer.kv_heads, -1, layer.head_dim)
    exact = rows @ case.keys.astype(mx.float32).swapaxes(-1, -2)
    through_codes = _coded_scores(cache, rows, range(first, total))
    keys = _read(cache, case, first, total)  # what this step attends to, every code decoded
    decoded = rows @ keys.astype(mx.float32).swapaxes(-1, -2)
    start, stop = coded.start, coded.stop
    scored = mx.concatenate([decoded[..., :start], through_codes, decoded[..., stop:]], axis=-1)
    distance = np.arange(first, total)[:, None] - np.arange(total)
    distance = np.tile(distance, (layer.group, 1))
    error, exact_rope = _square(scored - exact), _square(decoded - exact)
    kinds = {"all": distance >= 0, "recent": (distance >= 0) & (distance < RECENT)}
    kinds["older"] = distance >= RECENT
    for age in _ages(total):
        kinds[f"{AGE}{age}"] = (distance >= age) & (distance < 2 * age)
    measured = {
        **{name: error[..., where].mean() for name, where in kinds.items()},
        "exact_rope": exact_rope[..., kinds["all"]].mean(),
        "key_error": _square(keys - case.keys)[:, :, start:stop].mean(),
        "coded": len(coded),
    }
    return {name: finite(name, value) for name, value in measured.items()}


def _ages(total: int) -> list[int]:
    """The recent tokens' span and its doubles, below the number of tokens."""
    return [RECENT << octave for octave in range(total) if RECENT << octave < total]


def _prefill(cache: CompressedKVCache, case: Case, count: int) -> None:
    """Give the cache the first tokens, and their queries where there are any."""
    keys = _read(cache, case, 0, count)
    if case.earlier is not None:
        queries = case.earlier.astype(case.layer.mx_dtype)
        mx.eval(keys.step.attend(queries, scale=case.layer.head_dim**-0.5, mask="causal"))
    mx.eval(cache.state)


def _read(cache: CompressedKVCache, case: Case, start: int, stop: int) -> View:
    """Give the cache tokens; all keys as the step has them, decoded."""
    keys, _ = cache.update_and_fetch(case.keys[:, :, start:stop], case.values[:, :, start:stop])
    return keys


def _coded_span(cache: CompressedKVCache) -> range:
    """Places of the tokens that are codes."""
    first = min(cache.method.sinks, cache.exact.used)
    return range(first, first + cache.tokens_coded)


def _coded_scores(cache: CompressedKVCache, rows: mx.array, places: range) -> mx.array:
    """Scores of query rows ``(1, Hkv, M, D)`` against the coded tokens, from the codes."""
    queries = cache.codec.queries(rows, places)
    parts, start = [], _coded_span(cache).start
    for fields, count in cache.store.blocks():
        codes = Codes(dict(fields), dict(cache.constants))
        parts.append(cache.codec.scores(queries, codes, range(start, start + count)))
        start += count
    return mx.concatenate(parts, axis=-1)


def _square(x: mx.array) -> Array:
    return np.square(np.array(x.astype(mx.float32)).astype(np.float64))
