"""TurboQuant's inner-product code: a coarser code, and a sketch of what it leaves out."""

from __future__ import annotations

import math

import mlx.core as mx
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.schema import Field
from kvcompress.stages.base import Fields
from kvcompress.stages.gain import decode_gain, encode_gain, row_gain
from kvcompress.stages.levels import LevelKind, LloydMaxLevels, UniformLevels, scalar_levels
from kvcompress.stages.pack import pack, unpack, words
from kvcompress.stages.plane import Plane, plane_field, plane_of, write
from kvcompress.stages.products import dots, sums
from kvcompress.stages.transform import RandomisedHadamard


@frozen
class SketchCoder:
    """``z ~ gain * v + c |r| sign(r S) S^T`` with the residual ``r`` (arXiv 2504.19874, alg. 2).

    One of the ``bits`` goes to the sketch. Scores are unbiased over the choice of ``S``, but at
    equal bits their error is about twice that of the plain code, and softmax squares it: the
    plain code is the better choice for attention, and this one is for comparison. ``S`` is a random
    rotation: the paper's i.i.d. Gaussian ``S`` has 2.8 times the error of an orthogonal one.

    Fields: ``codes`` and ``signs``, packed words; ``gain`` and ``residual``, uint16.

    Attributes:
        dim: Channels, ``D``.
        heads: Heads of a layer, ``H``.
        bits: Bits a channel, the sign included: 2 to 8.
        kind: Levels of the coarser code.
        seed: Of the sketch; must differ from that of a rotation applied before.
    """

    dim: int
    heads: int
    bits: int
    kind: LevelKind = "lloyd-max"
    seed: int = 1
    _levels: LloydMaxLevels | UniformLevels = field(init=False, eq=False, repr=False)
    _plane: Plane = field(init=False, eq=False, repr=False)
    _sketch: RandomisedHadamard = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ConfigError(
                f"SketchCoder: bits must be from 2 to 8, one of them the sketch's (got {self.bits})"
            )
        object.__setattr__(self, "_levels", scalar_levels(self.dim, self.bits - 1, self.kind))
        object.__setattr__(self, "_plane", plane_of(self._levels))
        object.__setattr__(self, "_sketch", RandomisedHadamard(self.dim, self.seed))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Both planes and both gains."""
        return (
            plane_field("codes", self._levels, self.heads),
            Field("signs", "uint32", words(self.dim, 1), self.heads, payload_bits=self.dim),
            Field("gain", "uint16", 1, self.heads),
            Field("residual", "uint16", 1, self.heads),
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of the levels and of the sketch."""
        return self._levels.table_bytes + self._sketch.table_bytes

    @property
    def _unbiased(self) -> float:
        """``c sqrt(D)``: one over ``D`` times the mean size of a unit vector's coordinate.

        For large ``D`` it is ``sqrt(pi / (2 D)) sqrt(D)``, the paper's constant.
        """
        half = self.dim / 2
        mean = math.exp(math.lgamma(half) - math.lgamma(half + 0.5)) / math.sqrt(math.pi)
        return math.sqrt(self.dim) / (self.dim * mean)

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        """``(B, H, T, D)`` float32 to codes, signs and their gains."""
        gain, unit = row_gain(z)
        codes = write(self._levels, unit)
        residual = unit - self._plane.decode(codes)
        size = mx.sqrt(residual.square().mean(axis=-1, keepdims=True))
        signs = pack((self._sketch.forward(residual) > 0).astype(mx.uint8), 1)
        return {
            "codes": codes,
            "signs": signs,
            "gain": encode_gain(gain),
            "residual": encode_gain(gain * size * self._unbiased),
        }

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields to ``(B, H, T, D)`` float32."""
        coarse = self._plane.decode(fields["codes"]) * decode_gain(fields["gain"])
        return coarse + self._sketch.inverse(self._signs(fields) * decode_gain(fields["residual"]))

    def scores(self, q: mx.array, fields: Fields) -> mx.array:
        """``q . z``: the queries are sketched, not the tokens."""
        coarse = self._plane.scores(q, fields["codes"], decode_gain(fields["gain"]))
        fine = dots(self._sketch.forward(q), self._signs(fields))
        return coarse + fine * decode_gain(fields["residual"]).swapaxes(-1, -2)

    def mix(self, weights: mx.array, fields: Fields) -> mx.array:
        """``p @ z``: the sum is turned back, not the tokens."""
        coarse = self._plane.mix(weights, fields["codes"], decode_gain(fields["gain"]))
        fine = weights * decode_gain(fields["residual"]).swapaxes(-1, -2)
        return coarse + self._sketch.inverse(sums(fine, self._signs(fields)))

    def _signs(self, fields: Fields) -> mx.array:
        """-1 or 1 for each sketched channel, ``(B, H, T, D)`` float32."""
        return unpack(fields["signs"], 1, self.dim).astype(mx.float32) * 2.0 - 1.0
