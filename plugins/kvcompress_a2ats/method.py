"""A2ATS (arXiv 2502.12665): windowed rotary embedding and query-aware vector quantisation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.calibrate import LayerSamples, calibration_of
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import array, boolean, choice, fraction, illegal, integer, number
from kvcompress.errors import ConfigError
from kvcompress.fit.product import Books
from kvcompress.layers import LayerSpec
from kvcompress.method import Method, calibration_field
from kvcompress.stages.blended_vq import BlendedVQ
from kvcompress.stages.centre import fixed_centre
from kvcompress.stages.linear import Linear
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.rope import PreRope, RopePolicy
from kvcompress.stages.shared import shared_table
from kvcompress.stages.tables import TableQuantiser
from kvcompress.stages.transform import Identity
from kvcompress.stages.vq_coder import VQCoder
from kvcompress.stages.whiten import block_metric
from kvcompress.stages.windowed import WindowedRope
from kvcompress_a2ats.given import check_codebook, check_query_h, codebook_for, moment_for
from kvcompress_a2ats.tables import fit_tables, own_metric, query_moment


@frozen(kw_only=True)
class A2ATS(Method):
    """Keys before RoPE to the nearest centroids in the metric of the queries (Eq. 14).

    Far keys stay un-rotated and the query bears their rotation (Eq. 11 and 12). Where the paper has
    one rotation for every distance, ``rope="banded"`` has a mean rotation for each of a few bands
    of distance, which costs a fraction of the error. Codes are the cache; nothing is kept beside
    them. Not the paper's either: sub-vectors in place of one code for all channels, after a
    rotation that makes them equally hard to code; the mean is taken out; values are coded too.
    """

    name: ClassVar[str] = "a2ats"
    fit_options: ClassVar[tuple[str, ...]] = (
        "sub_dim", "codebook_bits", "codebooks", "use_query_aware", "query_h"
    )  # fmt: skip
    head_tables: ClassVar[tuple[str, ...]] = ("key_map", "key_books", "value_map", "value_books")

    sub_dim: int = integer(8, choices=(2, 4, 8, 16), help="Channels that share a code.")
    codebook_bits: int = integer(
        8, low=2, high=12, help="Bits of a code: 2**codebook_bits centroids a codebook."
    )
    codebooks: Books = choice(
        "sub-space",
        ("layer", "head", "sub-space"),
        help="What shares a codebook of a calibration: all heads and channels of a layer, those of "
        "a head, or a head's sub-vectors at the same channels.",
    )
    use_query_aware: bool = boolean(
        True, help="Whether the nearest centroid is that of least error in the scores."
    )
    query_h: Any = array(
        "Second moment E[q^T q] of the queries over a sub-vector's channels, (sub_dim, sub_dim) or "
        "one a KV head, in place of the calibration's."
    )
    beta: float = fraction(
        0.5,
        help="Weight of a key's direction against its length in choosing a centroid of a given "
        "codebook, where neither query_h nor a calibration knows the queries; 0: plainly nearest.",
    )
    retrieval_fraction: float = fraction(
        0.2,
        help="Part of the coded tokens that get the query-aware centroid, the rest the plainly "
        "nearest: those that were attended to most while they were exact. 1: all, which costs "
        "nothing more and errs least.",
    )
    attend_fraction: float = number(
        1.0,
        low=0.001,
        high=1.0,
        help="Part of the coded tokens whose values are read in a step of few queries: those with "
        "the highest scores in each KV head. 1: all.",
    )
    rope: Literal["banded", "single", "exact"] = choice(
        "banded",
        ("banded", "single", "exact"),
        help="How far keys meet the query. banded: a mean rotation for each band of distance. "
        "single: the paper's one rotation. exact: keys are decoded and rotated.",
    )
    b: int = integer(
        2048, low=0, high=1 << 20, help="The distance that stands for all with rope='single'."
    )
    growth: float = number(
        1.2, low=1.05, high=64.0, help="Ratio of the ends of a band, with rope='banded'."
    )
    codebook: Any = array(
        "A codebook in place of the calibration's: (2**codebook_bits, sub_dim), one a KV head, or "
        "one a head and sub-vector; of keys before RoPE. random: out of a hash, for tests of "
        "wiring and of no other use.",
        words=("random",),
    )
    value_codebook: Any = array(
        "The same for values; a codebook that is given serves values too unless this is."
    )
    calibration: Any = calibration_field()

    def check(self) -> None:
        """Refuse arrays that do not fit the other options."""
        check_codebook("codebook", self.codebook, self.centroids, self.sub_dim)
        check_codebook("value_codebook", self.value_codebook, self.centroids, self.sub_dim)
        check_query_h(self.query_h, self.sub_dim)
        if self.value_codebook is not None and self.codebook is None:
            raise illegal(self, "value_codebook", "None unless codebook is given")
        if self.query_h is not None and not self.use_query_aware:
            raise illegal(self, "query_h", "None with use_query_aware=False")

    @property
    def centroids(self) -> int:
        """Entries of a codebook; those that are shared see more vectors a token."""
        return 1 << self.codebook_bits

    def fit(self, samples: LayerSamples, *, seed: int) -> dict[str, Any]:
        """Maps and codebooks of the centred keys, for the queries, and of the centred values."""
        self._check_layer(samples.layer)
        moment = self._moment(samples.layer, samples.moments)
        return fit_tables(
            samples,
            moment,
            size=self.sub_dim,
            entries=self.centroids,
            books=self.codebooks,
            seed=seed,
        )

    def bind(self, layer: LayerSpec) -> KVCodec:
        """Compose centre, map, codebooks and rope policy.

        Raises:
            ConfigError: The layer's heads cannot be cut into sub-vectors, its rotation is not
                known, or an array is for other heads.
            CalibrationRequired: There is neither a codebook nor a calibration.
            CalibrationMismatch: The calibration is not of this layer, or of other options.
        """
        self._check_layer(layer)
        keys, values = self._given(layer) if self.codebook is not None else self._fitted(layer)
        return KVCodec(
            layer=layer,
            keys=keys,
            values=values,
            rope=self._rope(),
            attend_fraction=self.attend_fraction,
            careful_fraction=self.retrieval_fraction,
        )

    def _fitted(self, layer: LayerSpec) -> tuple[Pipeline, Pipeline]:
        calibration = calibration_of(self)
        tables, moments = calibration.tables(self, layer), calibration.moments(layer)

        def pipeline(part: str, mean: NDArray[np.float32], two: bool = False) -> Pipeline:
            whole = tables[f"{part}_map"]
            quantiser = ProductVQ(shared_table(tables[f"{part}_books"]), whole.shape[-1])
            plain = None
            if two:  # nearest before the map
                metric = shared_table(own_metric(whole, self.sub_dim))
                plain = ProductVQ(quantiser.codebook, quantiser.dim, metric)
            coder = VQCoder(quantiser, layer.kv_heads, plain=plain)
            return Pipeline(Linear.of(whole[:, None]), coder, fixed_centre(mean))

        return (
            pipeline("key", moments.key_mean, self.use_query_aware),
            pipeline("value", moments.value_mean),
        )

    def _given(self, layer: LayerSpec) -> tuple[Pipeline, Pipeline]:
        """Codebooks as they are given: nothing is taken out or mapped before them."""

        def book(name: str, given: Any, dim: int, metric: Any = None) -> ProductVQ:
            entries = codebook_for(name, given, layer, dim, self.centroids, self.sub_dim)
            return ProductVQ(shared_table(entries), dim, metric)

        moment = self._moment(layer, self.calibration and self.calibration.moments(layer))
        metric = None if moment is None else shared_table(block_metric(moment, self.sub_dim))
        near = book("codebook", self.codebook, layer.head_dim, metric)
        unseen = metric is None and self.use_query_aware and self.beta > 0
        keys: TableQuantiser = BlendedVQ(near, self.beta) if unseen else near
        two = unseen or metric is not None
        coder = VQCoder(keys, layer.kv_heads, plain=near.plain() if two else None)
        own = self.codebook if self.value_codebook is None else self.value_codebook
        values = book("value_codebook", own, layer.value_dim)
        return (
            Pipeline(Identity(layer.head_dim), coder),
            Pipeline(Identity(layer.value_dim), VQCoder(values, layer.kv_heads)),
        )

    def _moment(self, layer: LayerSpec, moments: Any) -> NDArray[np.floating[Any]] | None:
        if not self.use_query_aware:
            return None
        if self.query_h is not None:
            return moment_for(self.query_h, layer)
        return None if moments is None else query_moment(layer, moments)

    def _check_layer(self, layer: LayerSpec) -> None:
        where = f"layer {layer.index}"
        if not layer.rotary_known:
            raise ConfigError(
                f"a2ats: the rotation of {where} is not known, so its keys cannot be turned back; "
                f"use a method that codes keys as they come, such as turboquant or vecinfer"
            )
        for name, dim in (("head_dim", layer.head_dim), ("value_dim", layer.value_dim)):
            if dim % 2:
                raise ConfigError(f"a2ats: {name} must be even ({where} has {dim})")
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
