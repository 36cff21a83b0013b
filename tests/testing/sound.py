"""The smallest sound method of several kinds: what the kit must pass, and faults start from."""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import numpy as np
from attrs import frozen

from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import boolean, choice, integer
from kvcompress.layers import LayerSpec
from kvcompress.method import Method
from kvcompress.schema import Field
from kvcompress.stages.base import Coder, DecodingCoder, Fields, Transform
from kvcompress.stages.centre import no_centre, sequence_centre
from kvcompress.stages.hashing import signs
from kvcompress.stages.rope import PostRope, PreRope, RopePolicy


@frozen
class Grid:
    """``2**bits`` levels from -1 on, the last but one at 1; zero is among them."""

    bits: int
    dim: int
    table_bytes: int = 0

    @property
    def codes(self) -> int:
        return self.dim

    @property
    def top(self) -> int:
        return 2**self.bits - 2

    def encode(self, u: mx.array) -> mx.array:
        steps = mx.round((u + 1.0) * (self.top / 2))
        return mx.clip(steps, 0, self.top + 1).astype(mx.uint8)

    def decode(self, codes: mx.array) -> mx.array:
        return codes.astype(mx.float32) * (2 / self.top) - 1.0


@frozen
class MaxAbs(DecodingCoder):
    """Each row over its largest magnitude, on the grid."""

    grid: Grid
    heads: int
    table_bytes: int = 0

    @property
    def fields(self) -> tuple[Field, ...]:
        dim = self.grid.dim
        return (
            Field("codes", "uint8", dim, self.heads, self.grid.bits * dim),
            Field("scale", "float32", 1, self.heads),
        )

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        scale = mx.abs(z).max(axis=-1, keepdims=True)
        u = z / mx.where(scale > 0, scale, 1.0)
        return {"codes": self.grid.encode(u), "scale": scale}

    def decode(self, fields: Fields) -> mx.array:
        return self.grid.decode(fields["codes"]) * fields["scale"]


def flip_table(dim: int, seed: int) -> mx.array:
    table = mx.array(signs(dim, "flip", seed) * np.where(np.arange(dim) % 2, 2.0, 1.0))
    table = table.astype(mx.float32)
    mx.eval(table)
    return table


_TABLES: dict[tuple[int, int], mx.array] = {}


@frozen(eq=False)
class Flip:
    """Channels times signs and sizes that depend on the seed; the tables are shared."""

    dim: int
    seed: int

    @property
    def table(self) -> mx.array:
        return shared_table(self.dim, self.seed)

    @property
    def table_bytes(self) -> int:
        return int(self.table.nbytes)

    def forward(self, x: mx.array) -> mx.array:
        return x * self.table

    def inverse(self, z: mx.array) -> mx.array:
        return z / self.table

    def query(self, q: mx.array) -> mx.array:
        return q / self.table


def shared_table(dim: int, seed: int) -> mx.array:
    if (dim, seed) not in _TABLES:
        _TABLES[dim, seed] = flip_table(dim, seed)
    return _TABLES[dim, seed]


@frozen(kw_only=True)
class Sound(Method):
    """A method that keeps every law."""

    name: ClassVar[str] = "sound"

    bits: int = integer(6, low=3, high=8, help="Bits a channel.")
    frame: str = choice("post", ("post", "pre"), "Whether keys are turned back first.")
    centre: bool = boolean(True, "Whether the sequence's mean is taken out.")
    seed: int = integer(0, low=0, help="Seed of the signs.")

    def coder(self, dim: int, heads: int) -> Coder:
        return MaxAbs(Grid(self.bits, dim), heads)

    def transform(self, dim: int) -> Transform:
        return Flip(dim, self.seed)

    def policy(self) -> RopePolicy:
        return PostRope() if self.frame == "post" else PreRope()

    def pipeline(self, dim: int, heads: int) -> Pipeline:
        centre = sequence_centre(8) if self.centre else no_centre()
        return Pipeline(self.transform(dim), self.coder(dim, heads), centre)

    def bind(self, layer: LayerSpec) -> KVCodec:
        return KVCodec(
            layer,
            self.pipeline(layer.head_dim, layer.kv_heads),
            self.pipeline(layer.value_dim, layer.kv_heads),
            self.policy(),
        )
