"""VecInfer (arXiv 2510.06175): vector codes of keys whose outlier channels were smoothed away."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import mlx.core as mx
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.calibrate import LayerSamples, calibration_of
from kvcompress.calibrate.contract import Tables
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import boolean, choice, integer, number
from kvcompress.errors import ConfigError
from kvcompress.fit.product import fit_product
from kvcompress.layers import LayerSpec
from kvcompress.method import Method, calibration_field
from kvcompress.stages.base import Transform
from kvcompress.stages.centre import Centre, fixed_centre, no_centre
from kvcompress.stages.hashing import noise
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.shared import shared_table
from kvcompress.stages.transform import Chain, ChannelScale, Identity, RandomisedHadamard
from kvcompress.stages.vq_coder import VQCoder
from kvcompress_vecinfer.tables import Code, centred, channel_scale, spread

PRESETS: Final = {
    1.0: {"keys": Code(8, 8), "values": Code(8, 8)},
    1.25: {"keys": Code(8, 12), "values": Code(8, 8)},
    1.5: {"keys": Code(8, 12), "values": Code(8, 12)},
    2.0: {"keys": Code(4, 8), "values": Code(4, 8)},
}

TOKENS: Final = 4096  # that codebooks of several sub-spaces are fitted to at most
POINTS: Final = 24576  # sub-vectors that a codebook is fitted to at most


@frozen(kw_only=True)
class VecInfer(Method):
    """``z = (k - mean) / scale . R``; each sub-vector of ``z`` to the nearest entry of a codebook.

    Keys bear their rotation. ``scale`` is ``sqrt(max |k|)`` of a channel and ``R`` mixes all
    channels: together they leave no outliers, so that one small codebook serves every channel.
    Queries take the inverse, and scores stay as they were. Values have a codebook of their own and
    no transform.

    Not the paper's: the mean is taken out, and ``R`` is a randomised Hadamard transform in place of
    the plain one, which takes any head size and any input.
    """

    name: ClassVar[str] = "vecinfer"
    fit_options: ClassVar[tuple[str, ...]] = (
        "bits", "smooth", "hadamard", "centre", "codebooks", "seed"
    )  # fmt: skip
    head_tables: ClassVar[tuple[str, ...]] = ("scale", "keys", "values")

    bits: float = number(
        2.0,
        choices=tuple(PRESETS),
        help="Bits per channel, the mean of keys and values. 2: 8 bits for 4 channels. 1.5: 12 "
        "bits for 8. 1.25: keys as for 1.5, values as for 1. 1: 8 bits for 8.",
    )
    smooth: bool = boolean(True, help="Whether the channels of keys are scaled alike.")
    hadamard: bool = boolean(True, help="Whether the channels of keys are mixed.")
    centre: Literal["calibrated", "none"] = choice(
        "calibrated",
        ("calibrated", "none"),
        help="The mean taken out before coding: the calibration's, that of keys before RoPE and as "
        "it stands at each position; or none, as in the paper.",
    )
    codebooks: Literal["layer", "head", "sub-space"] = choice(
        "layer",
        ("layer", "head", "sub-space"),
        help="What shares a codebook: all heads and channels of a layer, as in the paper; those "
        "of a head; or a head's sub-vectors at the same channels.",
    )
    codebook: Literal["random"] | None = choice(
        None,
        ("random",),
        optional=True,
        help="random: a codebook out of a hash, with no scale and no mean; for tests of wiring "
        "without a calibration, and of no other use.",
    )
    seed: int = integer(0, low=0, help="Seed of the mixing and of the fit.")
    calibration: Any = calibration_field()

    @property
    def centroids(self) -> int:
        """Entries to which a token gives one vector; a head has eight sub-vectors or more."""
        entries = max(1 << code.bits for code in PRESETS[self.bits].values())
        return entries if self.codebooks == "sub-space" else entries // 8

    def fit(self, samples: LayerSamples, *, seed: int) -> dict[str, Any]:
        """Scales of the channels, and codebooks of the transformed keys and of the values.

        Raises:
            ConfigError: The layer's heads cannot be cut into sub-vectors.
        """
        layer = samples.layer
        self._check_layer(layer)
        samples = spread(centred(samples) if self.centre == "calibrated" else samples, seed)
        tables: dict[str, Any] = {}
        if self.smooth:
            tables["scale"] = channel_scale(samples.post_keys())
        # A token gives a sub-space's codebook one vector, and the others eight or more.
        few = samples.thinned(POINTS if self.codebooks == "sub-space" else TOKENS)
        keys = mx.array(few.post_keys()).swapaxes(0, 1)[None]
        coded = {
            "keys": np.array(self._transform(layer, tables).forward(keys))[0],
            "values": few.values.swapaxes(0, 1),
        }
        dead = 0
        for part, code in PRESETS[self.bits].items():
            found = fit_product(
                coded[part],
                code.sub_dim,
                1 << code.bits,
                books=self.codebooks,
                points=POINTS,
                rounds=code.rounds,
                seed=seed,
            )
            tables[part], tables[f"report.{part}_left"] = found.codebook, found.left
            dead += found.dead
        return {**tables, "report.dead_centroids": dead}

    def bind(self, layer: LayerSpec) -> KVCodec:
        """Compose means, transform and codebooks.

        Raises:
            ConfigError: The layer's heads cannot be cut into sub-vectors.
            CalibrationRequired: There is no calibration.
            CalibrationMismatch: The calibration is not of this layer, or of other options.
        """
        self._check_layer(layer)
        key_centre = value_centre = no_centre()
        if self.codebook == "random":
            tables: Tables = self._random_tables(layer)
        else:
            calibration = calibration_of(self)
            tables = calibration.tables(self, layer)
            if self.centre == "calibrated":
                moments = calibration.moments(layer)
                key_centre = fixed_centre(moments.key_mean)
                value_centre = fixed_centre(moments.value_mean)
        transform = self._transform(layer, tables)
        return KVCodec(
            layer=layer,
            keys=_pipeline(layer, transform, tables["keys"], key_centre),
            values=_pipeline(layer, Identity(layer.value_dim), tables["values"], value_centre),
        )

    def _check_layer(self, layer: LayerSpec) -> None:
        for part, name, dim in (
            ("keys", "head_dim", layer.head_dim),
            ("values", "value_dim", layer.value_dim),
        ):
            sub_dim = PRESETS[self.bits][part].sub_dim
            if dim % sub_dim:
                raise ConfigError(
                    f"vecinfer: {name} {dim} is not divisible by sub_dim {sub_dim} of "
                    f"bits={self.bits:g} (layer {layer.index}); bits=2 takes multiples of 4, the "
                    f"others multiples of 8"
                )

    def _transform(self, layer: LayerSpec, tables: Tables) -> Transform:
        stages: list[Transform] = []
        if "scale" in tables:
            stages.append(ChannelScale(tables["scale"]))
        if self.hadamard:
            stages.append(RandomisedHadamard(layer.head_dim, self.seed))
        return Chain(stages) if stages else Identity(layer.head_dim)

    def _random_tables(self, layer: LayerSpec) -> dict[str, NDArray[Any]]:
        tables = {}
        for part, code in PRESETS[self.bits].items():
            dim = layer.head_dim if part == "keys" else layer.value_dim
            heads = 1 if self.codebooks == "layer" else layer.kv_heads
            spaces = dim // code.sub_dim if self.codebooks == "sub-space" else 1
            shape = (heads, spaces, 1 << code.bits, code.sub_dim)
            tables[part] = noise(shape, "vecinfer", part, self.seed).astype(np.float16)
            tables[part][:, :, 0] = 0  # what is nothing stays nothing
        return tables


def _pipeline(
    layer: LayerSpec, transform: Transform, codebook: NDArray[Any], centre: Centre
) -> Pipeline:
    quantiser = ProductVQ(shared_table(codebook), transform.dim)
    return Pipeline(transform, VQCoder(quantiser, layer.kv_heads), centre)
