"""Every coder at several sizes, and rows to give them: shared by the tests of coders."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from kvcompress.stages.affine_coder import AffineCoder
from kvcompress.stages.base import Coder
from kvcompress.stages.gain_coder import GainCoder
from kvcompress.stages.levels import scalar_levels
from kvcompress.stages.sketch_coder import SketchCoder
from kvcompress.stages.tree_coder import TreeCoder

HEADS = 2


def _gain(dim: int, bits: int, kind: str) -> Coder:
    return GainCoder(scalar_levels(dim, bits, kind), HEADS)  # type: ignore[arg-type]


MAKE: dict[str, Callable[[int, int], Coder]] = {
    "uniform": lambda dim, bits: _gain(dim, bits, "uniform"),
    "lloyd-max": lambda dim, bits: _gain(dim, bits, "lloyd-max"),
    "sketch": lambda dim, bits: SketchCoder(dim, HEADS, max(bits, 2)),
    "sketch-uniform": lambda dim, bits: SketchCoder(dim, HEADS, max(bits, 2), kind="uniform"),
    "tree": lambda dim, bits: TreeCoder(dim, HEADS, max(bits, 2)),
    "affine": lambda dim, bits: AffineCoder(
        -(-dim // 32) * 32, HEADS, {1: 2, 7: 6}.get(bits, bits), 32, "float32"
    ),
}


def coder_dim(coder: Coder) -> int:
    """Channels that a coder takes."""
    quantiser = getattr(coder, "quantiser", coder)
    return int(quantiser.dim)


def rows(dim: int, tokens: int, seed: int, batch: int = 1) -> mx.array:
    """Gaussian rows ``(batch, HEADS, tokens, dim)``."""
    return mx.random.normal((batch, HEADS, tokens, dim), key=mx.random.key(seed))
