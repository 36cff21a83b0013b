"""TurboQuant (arXiv 2504.19874): random rotation, one scalar codebook for every channel."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from attrs import frozen

from kvcompress.calibrate import calibration_of
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import choice, illegal, integer
from kvcompress.layers import LayerSpec
from kvcompress.method import Method, calibration_field
from kvcompress.stages.base import Coder
from kvcompress.stages.centre import Centre, fixed_centre, no_centre, sequence_centre
from kvcompress.stages.gain import GainForm
from kvcompress.stages.gain_coder import GainCoder
from kvcompress.stages.levels import scalar_levels
from kvcompress.stages.sketch_coder import SketchCoder
from kvcompress.stages.transform import RandomisedHadamard
from kvcompress.stages.tree_coder import TreeCoder

Part = Literal["keys", "values"]


@frozen(kw_only=True)
class TurboQuant(Method):
    """``z = (x - mean) R``; ``z ~ gain * levels[codes]``.

    The rotation ``R`` makes the channels of any vector nearly Gaussian and alike, so a codebook
    that is known beforehand is near the best there is. Two things are not the paper's: the mean is
    taken out, because keys of real models carry most of their energy in it; and the stored gain
    is corrected for what the codes lose, which costs nothing.
    """

    name: ClassVar[str] = "turboquant"

    bits: int = integer(4, low=1, high=8, help="Bits per channel of keys and values.")
    key_bits: int | None = integer(
        None, low=1, high=8, optional=True, help="Bits per channel of keys, in place of bits."
    )
    value_bits: int | None = integer(
        None, low=1, high=8, optional=True, help="Bits per channel of values, in place of bits."
    )
    variant: Literal["mse", "prod", "rvq"] = choice(
        "mse",
        ("mse", "prod", "rvq"),
        help="mse: one code of least squared error. prod: one of the key bits goes to a sketch "
        "that makes scores unbiased (values have no product with a query and stay mse). rvq: "
        "two planes, of which the first is a coarser code by itself.",
    )
    levels: Literal["uniform", "lloyd-max"] | None = choice(
        None,
        ("uniform", "lloyd-max"),
        optional=True,
        help="Levels of a channel: a uniform grid (the default), which products read fastest, or "
        "Lloyd-Max. Not for rvq, whose levels are always Lloyd-Max.",
    )
    centre: Literal["sequence", "none", "calibrated"] = choice(
        "sequence",
        ("sequence", "none", "calibrated"),
        help="The mean taken out before coding: of the sequence's first coded tokens, none, or "
        "of a calibration.",
    )
    gain: Literal["matched", "raw", "unbiased"] | None = choice(
        None,
        ("matched", "raw", "unbiased"),
        optional=True,
        help="Gain of a coded key: one that keeps its length (the default), its own, or one that "
        "makes scores unbiased. Not for prod, whose sketch does that. Values have the "
        "gain of least error.",
    )
    seed: int = integer(0, low=0, help="Seed of the rotation.")
    calibration: Any = calibration_field()

    def check(self) -> None:
        """Refuse options that exclude each other."""
        least = {"keys": self.variant != "mse", "values": self.variant == "rvq"}
        for part in ("keys", "values"):
            if least[part] and self._bits(part) < 2:
                option = f"{part[:-1]}_bits"
                named = option if getattr(self, option) is not None else "bits"
                raise illegal(self, named, f"at least 2 for variant={self.variant!r}")
        if self.variant == "rvq" and self.levels == "uniform":
            raise illegal(self, "levels", "'lloyd-max' or None for variant='rvq'")
        if self.variant == "prod" and self.gain is not None:
            raise illegal(self, "gain", "None for variant='prod'")

    def bind(self, layer: LayerSpec) -> KVCodec:
        """Compose centre, rotation and coder for keys and values.

        Raises:
            CalibrationRequired: ``centre="calibrated"`` without a calibration.
            CalibrationMismatch: The calibration is not of this layer.
        """
        return KVCodec(
            layer=layer,
            keys=self._pipeline(layer, "keys", layer.head_dim),
            values=self._pipeline(layer, "values", layer.value_dim),
        )

    def _pipeline(self, layer: LayerSpec, part: Part, dim: int) -> Pipeline:
        rotation = RandomisedHadamard(dim, 2 * self.seed)
        return Pipeline(rotation, self._coder(layer, part, dim), self._centre(layer, part))

    def _coder(self, layer: LayerSpec, part: Part, dim: int) -> Coder:
        bits, kind = self._bits(part), self.levels or "uniform"
        form: GainForm = (self.gain or "matched") if part == "keys" else "least-squares"
        if self.variant == "rvq":
            return TreeCoder(dim, layer.kv_heads, bits, form)
        if self.variant == "prod" and part == "keys":
            return SketchCoder(dim, layer.kv_heads, bits, kind, seed=2 * self.seed + 1)
        return GainCoder(scalar_levels(dim, bits, kind), layer.kv_heads, form)

    def _centre(self, layer: LayerSpec, part: Part) -> Centre:
        if self.centre == "none":
            return no_centre()
        if self.centre == "sequence":
            return sequence_centre()
        moments = calibration_of(self).moments(layer)
        mean: np.ndarray = moments.key_mean if part == "keys" else moments.value_mean
        return fixed_centre(mean)

    def _bits(self, part: str) -> int:
        own = self.key_bits if part == "keys" else self.value_bits
        return self.bits if own is None else own
