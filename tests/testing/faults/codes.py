"""Codes that depend on more than their token."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.codec import Codes, KVCodec
from kvcompress.layers import LayerSpec
from kvcompress.schema import Schema
from kvcompress.stages.base import Transform
from tests.testing.faults.plant import (
    codec_fault,
    coder_fault,
    method_fault,
    transform_fault,
)
from tests.testing.sound import Flip, MaxAbs, Sound


@coder_fault("test_fields_are_as_declared")
@frozen
class AnotherDtype(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        return {**fields, "codes": fields["codes"].astype(mx.uint16)}


@codec_fault("test_stored_bytes_are_predicted", centre=True)
class ConstantsNotCounted(KVCodec):
    def _derive_schema(self) -> Schema:
        return Schema(super()._derive_schema().fields)


@coder_fault("test_chunking_does_not_change_codes")
@frozen
class ScaleOfTheChunk(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        scale = mx.abs(z).max(axis=(-2, -1), keepdims=True)
        u = self.grid.encode(z / mx.where(scale > 0, scale, 1.0))
        return {"codes": u, "scale": mx.broadcast_to(scale, (*z.shape[:3], 1))}


@coder_fault("test_chunking_does_not_change_codes")
@frozen
class AnotherBasisForOneToken(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        return super().encode(z if z.shape[2] > 1 else z[..., ::-1])


@frozen
class ScaleOfTheBatch(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        scale = mx.abs(z).max(axis=(0, -1), keepdims=True)
        u = self.grid.encode(z / mx.where(scale > 0, scale, 1.0))
        return {"codes": u, "scale": mx.broadcast_to(scale, (*z.shape[:3], 1))}


coder_fault("test_batch_rows_are_coded_apart")(ScaleOfTheBatch)
coder_fault("test_batch_rows_do_not_meet")(ScaleOfTheBatch)


@coder_fault("test_heads_are_coded_apart")
@frozen
class ScaleOfAllHeads(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        scale = mx.abs(z).max(axis=(1, -1), keepdims=True)
        u = self.grid.encode(z / mx.where(scale > 0, scale, 1.0))
        return {"codes": u, "scale": mx.broadcast_to(scale, (*z.shape[:3], 1))}


@coder_fault("test_heads_may_be_permuted")
@frozen
class CoarseFirstHead(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        first = mx.arange(z.shape[1]).reshape(1, -1, 1, 1) == 0
        coarse = fields["codes"] // 4 * 4
        return {**fields, "codes": mx.where(first, coarse, fields["codes"])}


@codec_fault("test_no_tokens_are_no_trouble")
class NothingBecomesAToken(KVCodec):
    def decode(self, codes: Codes, positions: Any) -> tuple[mx.array, mx.array]:
        keys, values = super().decode(codes, positions)
        if codes.tokens:
            return keys, values
        return tuple(mx.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)]) for x in (keys, values))


@transform_fault("test_equal_binds_are_equal")
@frozen(eq=False)
class TablesMadeAnew(Flip):
    own: mx.array = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "own", mx.array(np.array(super().table)))

    @property
    def table(self) -> mx.array:
        return self.own


@method_fault("test_seeds_matter")
@frozen(kw_only=True)
class SeedIgnored(Sound):
    def transform(self, dim: int) -> Transform:
        return Flip(dim, 0)


@method_fault("test_random_state_is_left_alone")
@frozen(kw_only=True)
class DrawsFromTheUser(Sound):
    def transform(self, dim: int) -> Transform:
        np.random.rand()
        return super().transform(dim)


@method_fault("test_random_state_is_left_alone")
@frozen(kw_only=True)
class SeedsMLX(Sound):
    def bind(self, layer: LayerSpec) -> KVCodec:
        mx.random.seed(self.seed)
        return super().bind(layer)


@coder_fault("test_encoding_needs_little_memory")
@frozen
class AllDistancesAtOnce(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        u = z / mx.maximum(fields["scale"], 1e-30)
        levels = self.grid.decode(mx.arange(2**self.grid.bits))
        gaps = mx.abs(u[..., None] - levels).argmin(axis=-1)
        return {**fields, "codes": gaps.astype(mx.uint8)}
