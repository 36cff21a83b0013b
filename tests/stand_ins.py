"""The smallest honest stages and method: what the cache and attention are tested with."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from attrs import field, frozen

from kvcompress.cache import make_cache
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.schema import Field
from kvcompress.stages.base import Careful, DecodingCoder, Fields
from kvcompress.stages.centre import no_centre, sequence_centre
from kvcompress.stages.rope import PostRope, RopePolicy


@frozen
class Same:
    """The identity map."""

    dim: int
    table_bytes: int = 0

    def forward(self, x: mx.array) -> mx.array:
        return x

    def inverse(self, z: mx.array) -> mx.array:
        return z

    def query(self, q: mx.array) -> mx.array:
        return q


@frozen
class Rounded(DecodingCoder):
    """Stores ``round(x * steps)``; so many steps that it loses nothing that matters."""

    dim: int
    heads: int
    steps: float = 2.0**20
    table_bytes: int = 0

    @property
    def fields(self) -> tuple[Field, ...]:
        return (Field("steps", "float32", self.dim, self.heads, 32 * self.dim),)

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        return {"steps": mx.round(z * self.steps)}

    def decode(self, fields: Fields) -> mx.array:
        return fields["steps"] / self.steps


@frozen
class Marked(Rounded):
    """Stores also which tokens it was told to take care of."""

    assignments: int = 2

    @property
    def fields(self) -> tuple[Field, ...]:
        return (*super().fields, Field("mark", "uint8", 1, 1))

    def encode(self, z: mx.array, careful: Careful = True) -> dict[str, mx.array]:
        marks = mx.broadcast_to(mx.array(careful), (z.shape[0], z.shape[2]))
        return {**super().encode(z), "mark": marks[:, None, :, None].astype(mx.uint8)}

    def importance(self, z: mx.array) -> mx.array:
        return mx.square(z).sum(axis=(1, 3))


@frozen
class StandIn:
    """A method with the options that the cache reads."""

    window: int = 16
    sinks: int = 4
    block: int = 8
    skip_layers: tuple[int, int] = (0, 0)
    steps: float = 2.0**20
    warmup: int = 0
    rope: RopePolicy = field(factory=PostRope)
    attend_fraction: float = 1.0
    careful_fraction: float = 1.0
    marked: bool = False
    name: str = "stand-in"
    fingerprint: str = "stand-in"

    def config(self) -> dict[str, Any]:
        return {}

    def make_cache(self, model: Any) -> list[Any]:
        return make_cache(self, model)

    def bind(self, layer: LayerSpec) -> KVCodec:
        centre = sequence_centre(self.warmup) if self.warmup else no_centre()
        kind = Marked if self.marked else Rounded
        keys = kind(layer.head_dim, layer.kv_heads, self.steps)
        values = Rounded(layer.value_dim, layer.kv_heads, self.steps)
        return KVCodec(
            layer,
            Pipeline(Same(layer.head_dim), keys, centre),
            Pipeline(Same(layer.value_dim), values, centre),
            self.rope,
            self.attend_fraction,
            self.careful_fraction,
        )


LAYER = LayerSpec(
    kv_heads=2,
    query_heads=6,
    head_dim=32,
    value_dim=16,
    dtype="float32",
    rotary=Rotary(32, base=1e4),
)


def cache(layer: LayerSpec = LAYER, budget: int = 64 << 20, **options: Any) -> CompressedKVCache:
    """A cache of the stand-in method."""
    method = StandIn(**options)
    return CompressedKVCache(method, layer, method.bind(layer), budget=budget)


def tokens(
    count: int, layer: LayerSpec = LAYER, seed: int = 0, batch: int = 1
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of ``count`` tokens."""
    keys = mx.random.split(mx.random.key(seed), 3)
    q = mx.random.normal((batch, layer.query_heads, count, layer.head_dim), key=keys[0])
    k = mx.random.normal((batch, layer.kv_heads, count, layer.head_dim), key=keys[1])
    v = mx.random.normal((batch, layer.kv_heads, count, layer.value_dim), key=keys[2])
    return q, k.astype(layer.mx_dtype), v.astype(layer.mx_dtype)


def largest(x: mx.array) -> float:
    """The largest magnitude."""
    return float(mx.abs(x.astype(mx.float32)).max()) if x.size else 0.0
