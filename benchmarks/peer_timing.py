"""Times of one list of caches, whatever made it: prefill, steps, attention's part, encoding."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen
from peer_memory import held_bytes

from kvcompress.cache.dispatch import NAME
from kvcompress.cache.trace import trace
from kvcompress.compare.evaluate import durations
from kvcompress.compare.session import Session

CHUNK = 64
"""Tokens that are encoded at a time where only encoding is timed."""

ENCODES = 3
"""Chunks that are encoded."""


@frozen(eq=False)
class Clock:
    """Times caches on a model.

    Attributes:
        model: An mlx-lm model.
        chunk: Tokens read at a time.
        steps: Single tokens, and single attention calls of all layers, that are timed.
    """

    model: Any
    chunk: int
    steps: int

    def run(self, caches: list[Any], context: Sequence[int]) -> dict[str, float]:
        """Read a context, and go on from there.

        Returns:
            ``prefill_tokens_per_second``; medians ``step_ms``, ``attention_ms`` (all layers'
            cache update and attention of one token, with random keys, values and queries) and
            ``encode_us_per_token`` (all layers' cache update of a chunk, without attention); and
            ``held_bytes``, what the caches held of their tokens when steps were timed.
        """
        session = Session(self.model, caches, self.chunk)
        start = time.perf_counter()
        session.prefill(context)
        prefill = time.perf_counter() - start
        steps = list(durations(session.greedy(context[-1], self.steps + 1)))
        size = held_bytes(caches)
        # The first of each also pays for what is made once.
        attention = list(durations(self._attend(caches)))
        encode = list(durations(self._encode(caches)))
        return {
            "prefill_tokens_per_second": len(context) / prefill,
            "step_ms": 1e3 * statistics.median(steps[1:]),
            "attention_ms": 1e3 * statistics.median(attention[1:]),
            "encode_us_per_token": 1e6 * statistics.median(encode[1:]) / CHUNK,
            "held_bytes": size,
        }

    def _attend(self, caches: list[Any]) -> Iterator[mx.array]:
        """One token through the attention of all layers, each after the one before."""
        places = list(zip(caches, self._layers(), strict=True))
        for step in range(self.steps + 1):
            after = mx.zeros(1)
            for index, (cache, (layer, scale, attend)) in enumerate(places):
                q, k, v = drawn(layer, 1, 1000 * step + index)
                q, k, v = mx.depends([q, k, v], [after])
                keys, values = cache.update_and_fetch(k, v)
                after = attend(q, keys, values, cache=cache, scale=scale, mask=None)
            mx.eval(after, [cache.state for cache in caches])
            yield after

    def _encode(self, caches: list[Any]) -> Iterator[None]:
        """A chunk into the caches of all layers."""
        places = list(zip(caches, self._layers(), strict=True))
        for step in range(ENCODES + 1):
            for index, (cache, (layer, _, _)) in enumerate(places):
                _, k, v = drawn(layer, CHUNK, 1000 * step + index)
                cache.update_and_fetch(k, v)
                mx.eval(cache.state)
            yield

    def _layers(self) -> Iterator[tuple[Any, float, Any]]:
        """Each layer, its scale, and the call by which its module attends at this moment."""
        for slot, block in zip(trace(self.model), self.model.layers, strict=True):
            module = sys.modules[type(block.self_attn).__module__]
            yield slot.layer, slot.scale, getattr(module, NAME)


def drawn(layer: Any, tokens: int, seed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Random queries, keys and values of a layer, computed."""
    key = mx.random.split(mx.random.key(seed), 3)
    shapes = (
        (1, layer.query_heads, tokens, layer.head_dim),
        (1, layer.kv_heads, tokens, layer.head_dim),
        (1, layer.kv_heads, tokens, layer.value_dim),
    )
    q, k, v = (mx.random.normal(shape, key=one) for shape, one in zip(shapes, key, strict=True))
    mx.eval(q, k, v)
    return q, k, v


def read_bytes_per_second(megabytes: int = 256, repeats: int = 5) -> float:
    """How fast memory can be read: the best of some ways to read a matrix once.

    NumPy's products use all cores of a CPU, MLX's whatever device it computes on. Call it last:
    idle threads of NumPy's BLAS take cores from MLX's.
    """
    matrix, vector = np.ones((megabytes << 8, 1024), np.float32), np.ones(1024, np.float32)
    theirs = mx.array(matrix), mx.array(vector)
    mx.eval(theirs)
    ways: tuple[Callable[[], Any], ...] = (
        lambda: matrix @ vector,
        lambda: np.vdot(matrix, matrix),
        lambda: mx.eval(theirs[0] @ theirs[1]),
        lambda: mx.eval(mx.sum(theirs[0])),
    )
    return matrix.nbytes / min(min(durations(way() for _ in range(repeats))) for way in ways)
