"""CommVQ (arXiv 2506.18879): additive codes of whole keys that commute with rotary embedding."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import numpy as np
from attrs import frozen

from kvcompress.calibrate import LayerSamples, calibration_of
from kvcompress.calibrate.contract import Tables
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import choice, illegal, integer
from kvcompress.errors import ConfigError
from kvcompress.fit.product import fit_product
from kvcompress.layers import LayerSpec
from kvcompress.method import Method, calibration_field
from kvcompress.stages.centre import fixed_centre, no_centre
from kvcompress.stages.hashing import noise
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.rope import PreRope
from kvcompress.stages.shared import shared_table
from kvcompress.stages.transform import Identity
from kvcompress.stages.vq_coder import VQCoder
from kvcompress_commvq.tables import TOKENS, fit_keys, quantiser_of, random_keys

STAGE_BITS: Final = 12
VALUE_ENTRIES: Final = 256


@frozen(kw_only=True)
class CommVQ(Method):
    """``k = mean + gain * sum_r (z_a + i z_b)_r``, complex for each pair that RoPE turns.

    Keys are coded before RoPE, all channels of a head by one index of 12 bits a stage; the gain is
    one number a token for all heads. A stage's 4096 centres come from one table of 64
    complex vectors: turning a decoded key is turning the table. Tables are fitted by expectation
    maximisation, stage by stage.

    Not the paper's: values, which there are coded by a trained network, here by product
    quantisation, each head's and sub-vector's codebook its own; and the mean is taken out of the
    keys before their gain.
    """

    name: ClassVar[str] = "commvq"
    fit_options: ClassVar[tuple[str, ...]] = ("bits", "stages", "centre", "seed")
    # No head_tables: the gain is over all heads of a token, so tables of some heads would not fit.

    bits: int = integer(
        2,
        choices=(1, 2),
        help="Bits per channel: of values, and of keys at most unless stages is given.",
    )
    stages: int | None = integer(
        None,
        low=1,
        high=64,
        optional=True,
        help="Stages of 12 bits a key and head; by default as many as bits allows, at least one.",
    )
    centre: Literal["calibrated", "none"] = choice(
        "calibrated",
        ("calibrated", "none"),
        help="The mean taken out of keys before their gain: the calibration's, or none, as in the "
        "paper.",
    )
    codebook: Literal["random"] | None = choice(
        None,
        ("random",),
        optional=True,
        help="random: tables out of a hash and no mean; for tests of wiring without a "
        "calibration, and of no other use.",
    )
    seed: int = integer(0, low=0, help="Seed of the fit.")
    calibration: Any = calibration_field()

    def check(self) -> None:
        """Refuse options that exclude each other: few random stages say nothing of a key."""
        if self.codebook == "random" and self.stages is not None:
            raise illegal(self, "stages", "None for codebook='random'")

    @property
    def centroids(self) -> int:
        """Entries of a codebook of values; a table of keys has fewer."""
        return VALUE_ENTRIES

    @property
    def sub_dim(self) -> int:
        """Channels of a value that share a code of 8 bits."""
        return 8 // self.bits

    def fit(self, samples: LayerSamples, *, seed: int) -> dict[str, Any]:
        """Tables of the keys before RoPE, and codebooks of the values.

        Raises:
            ConfigError: The layer's rotation is not known, its values cannot be cut into
                sub-vectors, or there are fewer tokens than entries of a table.
        """
        layer = samples.layer
        self._check_layer(layer)
        few = samples.thinned(TOKENS)
        keys = few.keys - few.moments.key_mean if self.centre == "calibrated" else few.keys
        tables = fit_keys(keys, layer, self._stages(layer), seed)
        values = fit_product(
            few.values.swapaxes(0, 1),
            self.sub_dim,
            VALUE_ENTRIES,
            books="sub-space",
            points=TOKENS,
            rounds=6,
            seed=seed,
        )
        tables["values"], tables["report.values_left"] = values.codebook, values.left
        tables["report.dead_centroids"] += values.dead
        return tables

    def bind(self, layer: LayerSpec) -> KVCodec:
        """Compose mean, gain and tables of the keys, and codebooks of the values.

        Raises:
            ConfigError: The layer's rotation is not known, or its values cannot be cut into
                sub-vectors.
            CalibrationRequired: There is no calibration.
            CalibrationMismatch: The calibration is not of this layer, or of other options.
        """
        self._check_layer(layer)
        centre = no_centre()
        if self.codebook == "random":
            tables: Tables = self._random_tables(layer)
        else:
            calibration = calibration_of(self)
            tables = calibration.tables(self, layer)
            if self.centre == "calibrated":
                centre = fixed_centre(calibration.moments(layer).key_mean)
        keys = VQCoder(quantiser_of(tables, layer), layer.kv_heads, gain=True)
        values = VQCoder(ProductVQ(shared_table(tables["values"])), layer.kv_heads)
        return KVCodec(
            layer=layer,
            keys=Pipeline(Identity(layer.head_dim), keys, centre),
            values=Pipeline(Identity(layer.value_dim), values),
            rope=PreRope(),
        )

    def _check_layer(self, layer: LayerSpec) -> None:
        if not layer.rotary_known:
            raise ConfigError(
                f"commvq: the rotation of layer {layer.index} is not known, so its keys cannot be "
                f"turned back; use a method that codes keys as they come, such as turboquant or "
                f"vecinfer"
            )
        if layer.value_dim % self.sub_dim:
            raise ConfigError(
                f"commvq: value_dim {layer.value_dim} is not divisible by sub_dim {self.sub_dim} "
                f"of bits={self.bits} (layer {layer.index}); bits=2 takes multiples of 4, bits=1 "
                f"multiples of 8"
            )

    def _stages(self, layer: LayerSpec) -> int:
        return self.stages or max(1, self.bits * layer.head_dim // STAGE_BITS)

    def _random_tables(self, layer: LayerSpec) -> Tables:
        shape = (layer.kv_heads, layer.value_dim // self.sub_dim, VALUE_ENTRIES, self.sub_dim)
        values = noise(shape, "commvq", "values", self.seed).astype(np.float16)
        values[:, :, 0] = 0  # what is nothing stays nothing
        return {**random_keys(layer, self._stages(layer), self.seed), "values": values}
