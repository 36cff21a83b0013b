"""The method: options, and a codec for a layer put together from stages."""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

from kv_microscaling.stages import Microscaled, TinyFloats
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import boolean, choice, integer
from kvcompress.layers import LayerSpec
from kvcompress.method import Method
from kvcompress.stages.centre import no_centre, sequence_centre
from kvcompress.stages.transform import Identity, RandomisedHadamard


@frozen(kw_only=True)
class Microscaling(Method):
    """``z = (x - mean) R``; each channel of ``z`` a tiny float, scaled with its group."""

    name: ClassVar[str] = "microscaling"

    bits: int = integer(
        4, low=3, high=8, help="Bits per channel; 4 is MXFP4 (E2M1), 6 is MXFP6 (E2M3)."
    )
    group: int = integer(32, choices=(16, 32, 64), help="Channels that share a power of two.")
    centre: Literal["sequence", "none"] = choice(
        "sequence",
        ("sequence", "none"),
        help="The mean taken out before coding: of the sequence's first coded tokens, or none.",
    )
    rotate: bool = boolean(True, help="Whether channels are mixed first, to spread outliers.")

    def bind(self, layer: LayerSpec) -> KVCodec:
        """The same stages for keys and values."""
        return KVCodec(
            layer=layer,
            keys=self._pipeline(layer.head_dim, layer.kv_heads),
            values=self._pipeline(layer.value_dim, layer.kv_heads),
        )

    def _pipeline(self, dim: int, heads: int) -> Pipeline:
        transform = RandomisedHadamard(dim) if self.rotate else Identity(dim)
        coder = Microscaled(TinyFloats(dim, self.bits), heads, self.group)
        centre = sequence_centre() if self.centre == "sequence" else no_centre()
        return Pipeline(transform, coder, centre)
