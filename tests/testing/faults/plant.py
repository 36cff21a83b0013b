"""How a fault is planted: a suite for something wrong, under the law that must catch it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from attrs import frozen

from kvcompress.codec import KVCodec
from kvcompress.layers import LayerSpec
from kvcompress.stages.base import Coder, Transform
from kvcompress.testing import MethodConformance
from tests.testing.sound import Grid, Sound

FAULTS: dict[str, tuple[str, type[MethodConformance]]] = {}
"""By name: the law that must catch it, and its suite."""


def suite(name: str, law: str, module: str, **body: Any) -> type[MethodConformance]:
    made = type(f"Suite{name}", (MethodConformance,), {"__module__": module, **body})
    setattr(sys.modules[module], made.__name__, made)  # another process imports it by name
    FAULTS[f"{law.removeprefix('test_')}-{name}"] = (law, made)
    return made


def method_fault(law: str, **body: Any) -> Callable[[type[Sound]], type[Sound]]:
    def mark(cls: type[Sound]) -> type[Sound]:
        suite(cls.__name__, law, cls.__module__, method=cls, **body)
        return cls

    return mark


def cache_fault(law: str) -> Callable[[type[Any]], type[Any]]:
    def mark(cls: type[Any]) -> type[Any]:
        def new_cache(self: Any, bound: Any, budget: int = 64 << 20) -> Any:
            return cls(bound.method, bound.layer, bound.codec, budget=budget)

        suite(cls.__name__, law, cls.__module__, method=Sound, new_cache=new_cache)
        return cls

    return mark


def coder_fault(law: str, **body: Any) -> Callable[[type[Any]], type[Any]]:
    """The method whose coder is the class."""

    def mark(cls: type[Any]) -> type[Any]:
        @frozen(kw_only=True)
        class WithCoder(Sound):
            def coder(self, dim: int, heads: int) -> Coder:
                made: Coder = cls(Grid(self.bits, dim), heads)
                return made

        suite(cls.__name__, law, cls.__module__, method=WithCoder, **body)
        return cls

    return mark


def transform_fault(law: str) -> Callable[[type[Any]], type[Any]]:
    """The method whose transform is the class."""

    def mark(cls: type[Any]) -> type[Any]:
        @frozen(kw_only=True)
        class WithTransform(Sound):
            def transform(self, dim: int) -> Transform:
                made: Transform = cls(dim, self.seed)
                return made

        suite(cls.__name__, law, cls.__module__, method=WithTransform)
        return cls

    return mark


def codec_fault(law: str, **options: Any) -> Callable[[type[Any]], type[Any]]:
    """The method whose codec is the class."""

    def mark(cls: type[Any]) -> type[Any]:
        @frozen(kw_only=True)
        class WithCodec(Sound):
            def bind(self, layer: LayerSpec) -> KVCodec:
                sound = Sound.bind(self, layer)
                made: KVCodec = cls(layer, sound.keys, sound.values, sound.rope)
                return made

        suite(cls.__name__, law, cls.__module__, method=WithCodec, options=options)
        return cls

    return mark
