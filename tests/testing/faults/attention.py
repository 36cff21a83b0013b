"""Attention that reads something else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.step import Step
from tests.testing.faults.plant import (
    cache_fault,
)


class MaskIgnored(Step):
    def attend(self, queries: mx.array, **given: Any) -> mx.array:
        return super().attend(queries, **{**given, "mask": None})


class SinkLogitsIgnored(Step):
    def attend(self, queries: mx.array, **given: Any) -> mx.array:
        return super().attend(queries, **{**given, "sinks": None})


class GroupsSwapped(Step):
    def attend(self, queries: mx.array, **given: Any) -> mx.array:
        B, Hq, L, D = queries.shape
        heads = self._codec.layer.kv_heads
        turned = queries.reshape(B, Hq // heads, heads, L, D).swapaxes(1, 2).reshape(B, Hq, L, D)
        return super().attend(turned, **given)


class HiddenRowsAreNaN(Step):
    def attend(self, queries: mx.array, **given: Any) -> mx.array:
        out = super().attend(queries, **given)
        mask = given.get("mask")
        if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
            return out
        return mx.where(mask.any(axis=-1)[..., None], out, mx.array(float("nan"), out.dtype))


def step_fault(law: str, kind: type[Step]) -> None:
    def advance(self: CompressedKVCache, keys: mx.array, values: mx.array) -> Step:
        step = CompressedKVCache.advance(self, keys, values)
        step.__class__ = kind
        return step

    made = type(kind.__name__, (CompressedKVCache,), {"advance": advance})
    cache_fault(law)(made)


for kind in (MaskIgnored, SinkLogitsIgnored, GroupsSwapped):
    step_fault("test_attention_is_that_of_dense_arrays", kind)
step_fault("test_rows_that_see_nothing_are_finite", HiddenRowsAreNaN)
