"""A model whose one layer is the test's own function, and a method that loses next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
from attrs import frozen
from mlx.nn.layers.base import Module
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from kvcompress.cache.nested import leaves
from kvcompress.codec import KVCodec
from kvcompress.layers import LayerSpec
from kvcompress.method import Method
from tests.stand_ins import StandIn

Attention = Callable[..., mx.array]
Layer = Callable[[mx.array, Any, Attention], mx.array]

HEADS, DIM = 2, 8


class Toy(Module):
    """Calls ``layer(x, cache, attention)`` for each cache; ``x`` is ``(1, HEADS, L, DIM)``."""

    def __init__(self, layer: Layer, caches: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.caches = caches

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in range(self.caches)]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = mx.broadcast_to(tokens[:, None, :, None], (1, HEADS, tokens.shape[1], DIM))
        x = x.astype(mx.float32)
        for entry in cache:
            x = self.layer(x, entry, scaled_dot_product_attention)
        return x


class Bundling(Toy):
    """Keeps its plain caches in bundles, alone or beside others."""

    def make_cache(self) -> list[Any]:
        return [CacheList(KVCache(), ArraysCache(1), KVCache()), KVCache(), CacheList(KVCache())]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return super().__call__(tokens, [c for c in leaves(cache) if type(c) is not ArraysCache])


def rotated(x: mx.array, offset: int, **options: Any) -> mx.array:
    """``mx.fast.rope`` of all channels."""
    settings = {"traditional": False, "base": 100.0, "scale": 1.0, **options}
    return mx.fast.rope(x, DIM, offset=offset, **settings)


def ordinary(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    """What nearly every family does."""
    queries, keys = rotated(x, cache.offset), rotated(x, cache.offset)
    keys, values = cache.update_and_fetch(keys, x)
    mask = "causal" if x.shape[2] > 1 else None
    return attention(queries, keys, values, cache=cache, scale=0.5, mask=mask)


@frozen(kw_only=True)
class Near(Method):
    """Rounds to steps of a millionth."""

    name: ClassVar[str] = "near"

    def bind(self, layer: LayerSpec) -> KVCodec:
        return StandIn().bind(layer)
