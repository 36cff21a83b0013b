"""Methods that misbehave inside a model."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import mlx.core as mx
from attrs import frozen

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.stages.base import Fields
from tests.testing.faults.plant import (
    coder_fault,
    method_fault,
)
from tests.testing.sound import MaxAbs, Sound


@method_fault("test_a_model_with_a_long_window_is_itself")
@frozen(kw_only=True)
class MakesCachesOfAnotherWindow(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        return Sound.make_cache(Sound(**{**own_options(self), "window": 0}), model)


@coder_fault("test_a_model_reads_its_codes")
@frozen
class NotANumber(MaxAbs):
    def decode(self, fields: Fields) -> mx.array:
        return super().decode(fields) * float("nan")


class ToBeQuantised(CompressedKVCache):
    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        from mlx_lm.models.cache import QuantizedKVCache

        made = QuantizedKVCache(group_size=group_size, bits=bits)
        if not self.empty():
            made.update_and_fetch(*(mx.array(x) for x in self.keys_and_values()))
        return made


class LosesATokenOnLoading(CompressedKVCache):
    @property
    def state(self) -> Any:
        return super().state

    @state.setter
    def state(self, state: Any) -> None:
        CompressedKVCache.state.fset(self, state)  # type: ignore[attr-defined]
        self.exact.values = mx.zeros_like(self.exact.values)


def own_options(method: Sound) -> dict[str, Any]:
    return {a.name: getattr(method, a.name) for a in attrs.fields(type(method))}


def remade(method: Sound, model: Any, kind: type[CompressedKVCache]) -> list[Any]:
    caches = Sound.make_cache(Sound(**own_options(method)), model)
    return [kind(c.method, c.layer, c.codec, lease=c.lease) for c in caches]


@method_fault("test_mlx_lm_generates_with_it")
@frozen(kw_only=True)
class OffersToQuantise(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        return remade(self, model, ToBeQuantised)


@method_fault("test_saved_caches_go_on")
@frozen(kw_only=True)
class LoadsLess(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        return remade(self, model, LosesATokenOnLoading)


@method_fault("test_a_long_prompt_needs_one_tile_more")
@frozen(kw_only=True)
class ScoresEverythingAtOnce(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        caches = Sound.make_cache(Sound(**own_options(self)), model)
        for made in caches:
            made._budget = 1 << 40
        return caches


@method_fault("test_conversations_have_caches_of_their_own")
@frozen(kw_only=True)
class OneListForAll(Sound):
    lists: ClassVar[list[list[Any]]] = []

    def make_cache(self, model: Any) -> list[Any]:
        if not self.lists:
            self.lists.append(Sound.make_cache(Sound(**own_options(self)), model))
        return self.lists[0]


@method_fault("test_attaching_leaves_no_trace")
@frozen(kw_only=True)
class LeavesAnAttribute(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        object.__setattr__(model, "compressed_by", self.name)
        return Sound.make_cache(Sound(**own_options(self)), model)


@method_fault("test_skipped_layers_stay_plain")
@frozen(kw_only=True)
class SkipsNothing(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        return Sound.make_cache(Sound(**{**own_options(self), "skip_layers": 0}), model)
