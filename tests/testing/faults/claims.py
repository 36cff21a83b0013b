"""Bytes that are not those that exist."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.step import Step
from tests.testing.faults.plant import (
    cache_fault,
)


@cache_fault("test_bytes_are_those_that_exist")
class KeepsAFullCopy(CompressedKVCache):
    def advance(self, keys: mx.array, values: mx.array) -> Step:
        self.raw = [*getattr(self, "raw", []), mx.array(np.array(keys))]
        return super().advance(keys, values)


@cache_fault("test_bytes_are_those_that_exist")
class ClaimsHalf(CompressedKVCache):
    @property
    def nbytes(self) -> int:
        return super().nbytes // 2


@cache_fault("test_bytes_are_those_that_exist")
class GraphThatGrows(CompressedKVCache):
    def advance(self, keys: mx.array, values: mx.array) -> Step:
        copied = mx.array(np.array(keys))
        self.sums = getattr(self, "sums", mx.array(0.0)) + copied.sum()
        return super().advance(keys, values)


@cache_fault("test_reports_are_arithmetic")
class PredictsLess(CompressedKVCache):
    @property
    def report(self) -> Any:
        return attrs.evolve(super().report, predicted_bytes=super().report.predicted_bytes // 2)


@cache_fault("test_reports_are_arithmetic")
class CountsRowsForTokens(CompressedKVCache):
    @property
    def report(self) -> Any:
        return attrs.evolve(super().report, tokens_seen=self.exact.used)
