"""Stages that break their laws."""

from __future__ import annotations

import mlx.core as mx
from attrs import frozen

from kvcompress.stages.base import Coder, Fields
from tests.testing.faults.plant import (
    coder_fault,
    method_fault,
    transform_fault,
)
from tests.testing.sound import Flip, Grid, MaxAbs, Sound


@transform_fault("test_transforms_invert")
@frozen(eq=False)
class TakenForItsOwnInverse(Flip):
    def inverse(self, z: mx.array) -> mx.array:
        return self.forward(z)


@transform_fault("test_transforms_keep_scores")
@frozen(eq=False)
class QueryByTheMapItself(Flip):
    def query(self, q: mx.array) -> mx.array:
        return self.forward(q)


@transform_fault("test_transforms_are_linear")
@frozen(eq=False)
class Shifted(Flip):
    def forward(self, x: mx.array) -> mx.array:
        return (x - 0.5) * self.table

    def inverse(self, z: mx.array) -> mx.array:
        return z / self.table + 0.5


@frozen
class RoundedDown(Grid):
    def encode(self, u: mx.array) -> mx.array:
        return mx.floor((mx.clip(u, -1.0, 1.0) + 1.0) * (self.top / 2)).astype(mx.uint8)


@frozen
class OneTooMany(Grid):
    def encode(self, u: mx.array) -> mx.array:
        return super().encode(u) + 1


@method_fault("test_quantisers_choose_the_nearest")
@frozen(kw_only=True)
class OffByHalfACell(Sound):
    def coder(self, dim: int, heads: int) -> Coder:
        return MaxAbs(RoundedDown(self.bits, dim), heads)


@method_fault("test_quantisers_choose_the_nearest", options={"bits": 5})
@frozen(kw_only=True)
class CodeOutOfRange(Sound):
    def coder(self, dim: int, heads: int) -> Coder:
        return MaxAbs(OneTooMany(self.bits, dim), heads)


@coder_fault("test_coders_attend_as_they_decode")
@frozen
class ScoresWithoutScale(MaxAbs):
    def scores(self, q: mx.array, fields: Fields) -> mx.array:
        return q @ self.grid.decode(fields["codes"]).swapaxes(-1, -2)


@coder_fault("test_coders_attend_as_they_decode")
@frozen
class MixesAnotherToken(MaxAbs):
    def mix(self, weights: mx.array, fields: Fields) -> mx.array:
        return weights[..., ::-1] @ self.decode(fields)
