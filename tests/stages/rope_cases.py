"""Rotations of every kind, and scores by definition."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvcompress.layers import Rotary
from kvcompress.schema import Field
from kvcompress.stages.base import DecodingCoder, Fields

DIM, HEADS = 32, 2

ROTATIONS: dict[str, Rotary | None] = {
    "plain": Rotary(32),
    "linear": Rotary(32, base=1e6, scale=0.25),
    "traditional": Rotary(32, traditional=True),
    "partial": Rotary(12),
    "partial, traditional": Rotary(12, traditional=True),
    "frequencies": Rotary(32, base=None, freqs=(*(1.7**i for i in range(14)), np.inf, np.inf)),
    "none": None,
}


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def rotated(x: mx.array, rotary: Rotary | None, positions: range) -> mx.array:
    """``(B, H, T, D)`` as attention sees it; rows of ``(B, H, G * L, D)`` positions fastest."""
    if rotary is None:
        return x
    B, H, M, D = x.shape
    rows = x.reshape(B, H * M // len(positions), len(positions), D)
    return rotary.rotate(rows, positions).reshape(B, H, M, D)


class Plain(DecodingCoder):
    """Stores what it is given."""

    table_bytes = 0
    fields = (Field("z", "float32", DIM, HEADS),)

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        return {"z": z}

    def decode(self, fields: Fields) -> mx.array:
        return fields["z"]


def largest(x: mx.array) -> float:
    return float(mx.abs(x).max().item())
