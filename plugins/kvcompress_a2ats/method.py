"""A2ATS (arXiv 2502.12665): windowed rotary embedding and query-aware vector quantisation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from attrs import frozen
from numpy.typing import NDArray

from kvcompress.calibrate import LayerSamples, calibration_of
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import boolean, choice, integer, number
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec
from kvcompress.method import Method, calibration_field
from kvcompress.stages.centre import fixed_centre
from kvcompress.stages.linear import Linear
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.rope import PreRope, RopePolicy
from kvcompress.stages.shared import shared_table
from kvcompress.stages.vq_coder import VQCoder
from kvcompress.stages.windowed import WindowedRope
from kvcompress_a2ats.tables import fit_tables

Tables = dict[str, NDArray[Any]]


@frozen(kw_only=True)
class A2ATS(Method):
    """Keys before RoPE to the nearest centroids in the metric of the queries (Eq. 14).

    Far keys stay un-rotated and the query bears their rotation (Eq. 11 and 12). Where the paper has
    one rotation for every distance, ``rope="banded"`` has a mean rotation for each of a few bands
    of distance, which costs a fraction of the error. Codes are the cache; nothing is kept beside
    them.
    """

    name: ClassVar[str] = "a2ats"
    fit_options: ClassVar[tuple[str, ...]] = ("sub_dim", "codebook_bits", "use_query_aware")

    sub_dim: int = integer(8, choices=(2, 4, 8, 16), help="Channels that share a code.")
    codebook_bits: int = integer(
        8, low=1, high=12, help="Bits of a code: 2**codebook_bits centroids a codebook."
    )
    use_query_aware: bool = boolean(
        True, help="Whether the nearest centroid is that of least error in the scores."
    )
    rope: Literal["banded", "single", "exact"] = choice(
        "banded",
        ("banded", "single", "exact"),
        help="How far keys meet the query. banded: a mean rotation for each band of distance. "
        "single: the paper's one rotation. exact: keys are decoded and rotated.",
    )
    b: int = integer(2048, low=0, help="The distance that stands for all with rope='single'.")
    growth: float = number(
        2.0, low=1.05, high=64.0, help="Ratio of the ends of a band, with rope='banded'."
    )
    calibration: Any = calibration_field()

    @property
    def centroids(self) -> int:
        """Entries of a codebook."""
        return 1 << self.codebook_bits

    def fit(self, samples: LayerSamples, *, seed: int) -> Tables:
        """Maps and codebooks of the centred keys, for the queries, and of the centred values."""
        self._check_layer(samples.layer)
        return fit_tables(
            samples,
            size=self.sub_dim,
            entries=self.centroids,
            query_aware=self.use_query_aware,
            seed=seed,
        )

    def bind(self, layer: LayerSpec) -> KVCodec:
        """Compose centre, codebooks and rope policy.

        Raises:
            ConfigError: The layer's heads cannot be cut into sub-vectors, or its rotation is not
                known.
            CalibrationRequired: There is no calibration.
            CalibrationMismatch: The calibration is not of this layer, or of other options.
        """
        self._check_layer(layer)
        calibration = calibration_of(self)
        tables, moments = calibration.tables(self, layer), calibration.moments(layer)
        means = {"key": moments.key_mean, "value": moments.value_mean}
        keys, values = (
            Pipeline(
                Linear.of(tables[f"{part}_map"][:, None]),
                VQCoder(ProductVQ(shared_table(tables[f"{part}_books"])), layer.kv_heads),
                fixed_centre(mean),
            )
            for part, mean in means.items()
        )
        return KVCodec(layer=layer, keys=keys, values=values, rope=self._rope())

    def _check_layer(self, layer: LayerSpec) -> None:
        where = f"layer {layer.index}"
        if not layer.rotary_known:
            raise ConfigError(
                f"a2ats: the rotation of {where} is not known, so its keys cannot be turned back; "
                f"use a method that codes keys as they come, such as turboquant or vecinfer"
            )
        for name, dim in (("head_dim", layer.head_dim), ("value_dim", layer.value_dim)):
            if dim % self.sub_dim:
                raise ConfigError(
                    f"a2ats: {name} {dim} is not divisible by sub_dim {self.sub_dim} ({where})"
                )

    def _rope(self) -> RopePolicy:
        if self.rope == "exact":
            return PreRope()
        if self.rope == "single":
            return WindowedRope(constant=self.b)
        return WindowedRope(first=max(self.window, 1), growth=self.growth)
