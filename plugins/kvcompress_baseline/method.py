"""The yardsticks: no compression, and MLX's own group quantisation."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

from kvcompress.cache.native import native_caches
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import integer
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec
from kvcompress.method import Method
from kvcompress.stages.affine_coder import AffineCoder, legal_groups
from kvcompress.stages.transform import Identity


@frozen(kw_only=True)
class FP16(Method):
    """No compression. Every token is exact, whatever ``window`` and ``sinks`` ask for."""

    name: ClassVar[str] = "fp16"

    def bind(self, layer: LayerSpec) -> KVCodec:
        """There is no codec.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"fp16: layer {layer.index} keeps the model's own cache, so there is no codec to bind; "
            f"call make_cache(model)"
        )

    def make_cache(self, model: Any) -> list[Any]:
        """The caches that the model makes for itself."""
        return native_caches(model)


@frozen(kw_only=True)
class Affine(Method):
    """``mx.quantize`` of keys and values as they come, as in mlx-lm's ``QuantizedKVCache``."""

    name: ClassVar[str] = "affine"

    bits: int = integer(4, choices=(2, 3, 4, 5, 6, 8), help="Bits per channel.")
    group_size: int = integer(
        64,
        choices=(32, 64, 128),
        help="Channels that share a scale and a bias; where it does not divide a head, the "
        "largest smaller one that does.",
    )

    def bind(self, layer: LayerSpec) -> KVCodec:
        """Quantise keys and values alike, without a transform.

        Raises:
            ConfigError: No group size divides the layer's head.
        """
        return KVCodec(
            layer=layer,
            keys=self._pipeline(layer, "head_dim", layer.head_dim),
            values=self._pipeline(layer, "value_dim", layer.value_dim),
        )

    def _pipeline(self, layer: LayerSpec, name: str, dim: int) -> Pipeline:
        groups = [group for group in legal_groups(dim) if group <= self.group_size]
        if not groups:
            raise ConfigError(
                f"affine: {name} must be a multiple of 32 (layer {layer.index} has {dim}); "
                f"turboquant takes any {name}"
            )
        coder = AffineCoder(dim, layer.kv_heads, self.bits, groups[0], layer.dtype)
        return Pipeline(Identity(dim), coder)
