"""Times of one list of caches, whatever made it: prefill, steps, attention's part, encoding."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from attrs import frozen

from kvcompress.cache.dispatch import NAME
from kvcompress.cache.trace import trace
from kvcompress.compare.evaluate import durations
from kvcompress.compare.session import Session

CHUNK = 64
"""Tokens that are encoded at a time where only encoding is timed."""


@frozen(eq=False)
class Clock:
    """Times caches on a model.

    Attributes:
        model: An mlx-lm model.
        chunk: Tokens read at a time.
        steps: Single tokens, and single attention calls of all layers, that are timed.
        repeats: Times that the context is read.
    """

    model: Any
    chunk: int
    steps: int
    repeats: int

    def run(self, make_caches: Callable[[], list[Any]], context: Sequence[int]) -> dict[str, float]:
        """Read a context several times, then go on from the last.

        Returns:
            Medians: ``prefill_tokens_per_second``, ``step_ms``, ``attention_ms`` (all layers'
            cache update and attention of one token, with random keys, values and queries) and
            ``encode_us_per_token`` (all layers' cache update of a chunk, without attention).
        """
        seconds = []
        for _ in range(self.repeats):
            session = Session(self.model, make_caches(), self.chunk)
            start = time.perf_counter()
            session.prefill(context)
            seconds.append(time.perf_counter() - start)
        steps = list(durations(session.greedy(context[-1], self.steps + 1)))
        # The first of each also pays for what is made once.
        attention = list(durations(self._attend(session.caches)))
        encode = list(durations(self._encode(session.caches)))
        return {
            "prefill_tokens_per_second": len(context) / statistics.median(seconds),
            "step_ms": 1e3 * statistics.median(steps[1:]),
            "attention_ms": 1e3 * statistics.median(attention[1:]),
            "encode_us_per_token": 1e6 * statistics.median(encode[1:]) / CHUNK,
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
        for step in range(self.repeats + 1):
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
