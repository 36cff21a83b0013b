"""Fifty thousand tokens through one cache: nothing is lost, nothing leaks, no step grows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.step import Step
from kvcompress.cache.store import SEAL
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.registry import get_method
from kvcompress.testing.calibration import synthetic_calibration
from kvcompress.testing.data import plain_keys
from kvcompress.testing.oracles import rope
from kvcompress.testing.subject import step_of

TOKENS, CHUNK, STEPS = 50_000, 1024, 48
NEEDLES = (0, 3, 4, 700, 4099, 4100, 8191, 20_000, 33_333, 45_060, 49_000, 49_871, 49_999)
SCALE = 0.3  # a needle's score stands some 30 above any other's

LAYER = LayerSpec(0, 1, 2, 128, 32, "float32", Rotary(128))


@frozen(eq=False)
class Haystack:
    """Keys and values ``(1, 1, TOKENS, D)``, and a query for each needle, ``(1, 2, n, D)``."""

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray


@pytest.fixture(scope="module")
def hay() -> Haystack:
    plain = plain_keys(LAYER, TOKENS)
    keys = rope(plain, range(TOKENS), LAYER.rotary).astype(np.float32)
    values = np.random.default_rng(3).standard_normal((1, 1, TOKENS, LAYER.value_dim))
    # A query that looks for what makes a key unlike the others.
    apart = (plain - plain.mean(axis=2, keepdims=True))[:, :, NEEDLES]
    queries = rope(apart, NEEDLES, LAYER.rotary).astype(np.float32)
    return Haystack(keys, values.astype(np.float32), np.repeat(queries, 2, axis=1))


def feed(cache: CompressedKVCache, hay: Haystack, until: int, chunk: int) -> Iterator[Step]:
    """Give the cache its next tokens, each step computed once it was looked at."""
    while cache.offset < until:
        part = slice(cache.offset, min(cache.offset + chunk, until))
        rows = mx.array(hay.keys[:, :, part]), mx.array(hay.values[:, :, part])
        mx.eval(rows)
        step = step_of(cache.update_and_fetch(*rows)[0])
        yield step
        mx.eval(step.settle)


def fed(cache: CompressedKVCache, hay: Haystack, until: int, chunk: int = CHUNK) -> None:
    for _ in feed(cache, hay, until, chunk):
        pass


def operations(step: Step, path: Path) -> int:
    """How many arrays and operations computing what a step stores touches."""
    mx.export_to_dot(str(path), step.settle)
    return len(path.read_text().splitlines())


def active() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def check_bytes(cache: CompressedKVCache, before: int) -> None:
    report = cache.report
    assert report.tokens_seen == cache.offset
    assert report.stored_bytes == report.predicted_bytes
    assert report.reserved_bytes < 400 * cache.codec.schema.bytes_per_token + 20_000
    assert abs(active() - before - cache.nbytes) < 0.01 * cache.nbytes + 4096


def check_needles(cache: CompressedKVCache, hay: Haystack) -> None:
    held = [place for place, position in enumerate(NEEDLES) if position < cache.offset]
    queries = mx.array(hay.queries[:, :, held])
    found = np.array(cache.now().attend(queries, scale=SCALE))[0]
    for row, place in enumerate(held):
        value = hay.values[0, 0, NEEDLES[place]]
        for head in found:
            assert np.dot(head[row], value) > 0.85 * np.linalg.norm(value) * np.linalg.norm(
                head[row]
            )
            assert 0.7 < np.linalg.norm(head[row]) / np.linalg.norm(value) < 1.3


@pytest.mark.parametrize(
    ("name", "options"), [("turboquant", {"bits": 4}), ("vecinfer", {"bits": 2.0})]
)
def test_a_long_run(name: str, options: dict[str, Any], hay: Haystack, tmp_path: Path) -> None:
    if name != "turboquant":
        options = {**options, "calibration": synthetic_calibration()}
    method = get_method(name, **options)
    codec = method.bind(LAYER)
    fed(CompressedKVCache(method, LAYER, codec), hay, 2 * CHUNK)  # whatever is made once
    limit = mx.set_cache_limit(0)  # a buffer used again may be larger than what it holds
    try:
        before = active()
        cache = CompressedKVCache(method, LAYER, codec)
        counts = []
        for sealed in (2, 11):
            fed(cache, hay, sealed * SEAL + 150)
            counts.append(
                [
                    operations(step, tmp_path / "graph")
                    for step in feed(cache, hay, cache.offset + STEPS, 1)
                ]
            )
            check_bytes(cache, before)
        assert counts[0] == counts[1]
        assert len(set(counts[0])) > 1  # steps that code a block are among them
        check_needles(cache, hay)
        fed(cache, hay, TOKENS - 2 * STEPS)
        fed(cache, hay, TOKENS, 1)
        assert cache.tokens_coded > TOKENS - 200
        check_bytes(cache, before)
        check_needles(cache, hay)
        del cache
        assert active() - before < 4096
    finally:
        mx.set_cache_limit(limit)
