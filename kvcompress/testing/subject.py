"""What is under test: a method, bound to drawn layers with drawn options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
import pytest
from attrs import frozen
from hypothesis import strategies as st

from kvcompress.attention import DEFAULT_BUDGET
from kvcompress.codec import KVCodec
from kvcompress.config import Option, construct, options_of
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.method import CompressionMethod, Method
from kvcompress.stages.windowed import WindowedRope
from kvcompress.testing.calibration import synthetic_calibration, takes_calibration
from kvcompress.testing.data import Tokens, tokens
from kvcompress.testing.law import Draw, LawError
from kvcompress.testing.strategies import layers

if TYPE_CHECKING:
    from kvcompress.cache.kvcache import CompressedKVCache
    from kvcompress.cache.view import Attends

STANDARD = LayerSpec(
    kv_heads=2, query_heads=4, head_dim=64, dtype="float32", rotary=Rotary(64, base=1e4)
)
_SHARED = frozenset(option.name for option in options_of(Method))


@frozen(eq=False)
class Bound:
    """A configured method and its codec for a layer."""

    method: CompressionMethod
    layer: LayerSpec
    codec: KVCodec


class Subject:
    """Names the method under test, and how its parts are made.

    Attributes:
        method: The name under which the method is registered, or its class.
        options: Options that differ from their defaults throughout.
        capabilities: Words of ``kvcompress.testing.capabilities``; ``None`` takes them from the
            method's ``MethodInfo``.
        standard_layer: A layer that the method must take with its default options.
    """

    method: ClassVar[str | type[Any]] = ""
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    capabilities: ClassVar[frozenset[str] | None] = None
    standard_layer: ClassVar[LayerSpec] = STANDARD

    # -- hooks -----------------------------------------------------------------------------

    @cached_property
    def cls(self) -> type[Any]:
        """The method's class."""
        from kvcompress.registry import method_class

        if not self.method:
            raise LawError(
                f"{type(self).__name__}: set `method` to the name under which a method is "
                f"registered, or to its class"
            )
        return method_class(self.method) if isinstance(self.method, str) else self.method

    def calibration(self) -> Any:
        """What the method is given as ``calibration``; synthetic tokens unless overridden."""
        return synthetic_calibration()

    def build(self, **options: Any) -> CompressionMethod:
        """The method with ``options`` over :attr:`options`."""
        from kvcompress.registry import get_method

        chosen = {**self.options, **options}
        extra = {}
        if takes_calibration(self.cls):
            given = "calibration" in chosen
            extra["calibration"] = chosen.pop("calibration") if given else self.calibration()
        if isinstance(self.method, str):
            return get_method(self.method, **extra, **chosen)
        built: CompressionMethod = construct(self.cls, chosen, **extra)
        return built

    def new_cache(self, bound: Bound, budget: int = DEFAULT_BUDGET) -> CompressedKVCache:
        """An empty cache of one layer."""
        from kvcompress.cache.kvcache import CompressedKVCache

        return CompressedKVCache(bound.method, bound.layer, bound.codec, budget=budget)

    # -- what laws ask for -----------------------------------------------------------------

    def can(self, capability: str) -> bool:
        """Whether a capability is declared."""
        if self.capabilities is not None:
            return capability in self.capabilities
        if not isinstance(self.method, str):
            return False
        from kvcompress.registry import method_info

        return capability in method_info(self.method).capabilities

    def is_calibrated(self) -> bool:
        """Whether the method's tables are fitted to tokens."""
        return hasattr(self.cls, "fit")

    def effort(self) -> float:
        """Part of the profile's examples to try; a calibrated method fits tables for each."""
        return 0.4 if self.is_calibrated() else 1.0

    def drawable_options(self) -> list[Option]:
        """The method's own options, apart from those that every method has and fixed ones."""
        return [
            option
            for option in options_of(self.cls)
            if option.name not in _SHARED and option.name not in self.options
        ]

    def reads_decoded_keys(self, bound: Bound) -> bool:
        """Whether scores against codes are to equal those against decoded keys."""
        windowed = isinstance(bound.codec.rope, WindowedRope) and bound.layer.rotary is not None
        whole = bound.codec.attend_fraction == 1
        return whole and not windowed and not self.can("approximate-scores")

    def needs_codec(self) -> None:
        """Skip the law for a method that keeps the model's own caches."""
        if self.can("plain"):
            pytest.skip(f"{self.method} keeps the model's own caches and has no codec")

    def standard(self, layer: LayerSpec | None = None, **options: Any) -> Bound:
        """The method with these options on a layer.

        Raises:
            LawError: The default options do not fit the standard layer.
        """
        self.needs_codec()
        layer = layer or self.standard_layer
        method = self.build(**options)
        try:
            return Bound(method, layer, method.bind(layer))
        except ConfigError as error:
            if options or layer != self.standard_layer:
                raise
            raise LawError(
                f"the default options must fit {layer}, but: {error}; name another layer as "
                "`standard_layer`"
            ) from error

    def draw_bound(
        self,
        draw: Draw,
        layer: st.SearchStrategy[LayerSpec] | None = None,
        **options: Any,
    ) -> Bound:
        """Draw options and a layer that fit each other.

        Options are drawn one after the other, and one that does not fit those before it is left
        at its default; a layer that the options do not take gets the default ones.
        """
        self.needs_codec()
        wanted = draw(layer if layer is not None else layers(), "layer")
        drawn = self._draw_options(draw, options)
        for attempt in ({**drawn, **options}, options):
            method = self.build(**attempt)
            try:
                return Bound(method, wanted, method.bind(wanted))
            except ConfigError:
                continue
        return self.standard(**options)

    def _draw_options(self, draw: Draw, fixed: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for option in self.drawable_options():
            if option.name in fixed:
                continue
            if draw(st.booleans(), f"set {option.name}"):
                tried = {**kept, option.name: draw(option.strategy(), option.name)}
                try:
                    self.build(**tried, **fixed)
                except ConfigError:
                    continue
                kept = tried
        return kept

    def draw_cache_options(self, draw: Draw) -> dict[str, Any]:
        """Small windows, sinks and blocks, so that short sequences are coded."""
        return {
            "window": draw(st.sampled_from((-1, 0, 3, 16, 24)), "window"),
            "sinks": draw(st.sampled_from((0, 1, 4)), "sinks"),
            "block": draw(st.sampled_from((16, 32)), "block"),
        }


def coded(bound: Bound, count: int, *, batch: int = 1, seed: int = 0) -> tuple[Tokens, Any]:
    """Tokens of a layer, and what the sequence that begins with them keeps once."""
    came = tokens(bound.layer, count, batch=batch, seed=seed)
    return came, bound.codec.begin(came.keys, came.values, came.positions)


def step_of(keys: mx.array) -> Attends:
    """What attends for the step that fetched these keys.

    Raises:
        LawError: They are no lazy view, so that nothing could.
    """
    from kvcompress.cache.view import View

    if not isinstance(keys, View):
        raise LawError(f"update_and_fetch gives a {type(keys).__name__}, not a lazy view")
    return keys.step
