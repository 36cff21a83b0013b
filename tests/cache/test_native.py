from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from kvcompress.cache.native import CacheMaker, attached_to, native_caches
from kvcompress.errors import UnsupportedModel
from tests.toy_model import Near
from tests.zoo import tiny

METHOD = Near()


def types(caches: list[Any]) -> list[type]:
    return [type(cache) for cache in caches]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3n"])
def test_a_models_own_caches_are_the_same_with_a_maker_on_it(family: str) -> None:
    model = tiny(family)
    own = types(make_prompt_cache(model))
    assert types(native_caches(model)) == own
    maker = CacheMaker(model, METHOD, lambda model: ["built"])
    maker.put()
    assert attached_to(model) is maker
    assert model.make_cache() == make_prompt_cache(model) == ["built"]
    assert types(native_caches(model)) == own
    maker.remove()
    assert attached_to(model) is None
    assert "make_cache" not in vars(model)


def test_a_builder_that_asks_the_model_gets_the_models_own_caches() -> None:
    model = tiny("gpt_neox")
    CacheMaker(model, METHOD, lambda model: [types(make_prompt_cache(model))]).put()
    assert make_prompt_cache(model) == [[KVCache] * 4]


def test_a_builder_that_fails_leaves_the_maker_working() -> None:
    calls: list[int] = []

    def build(model: Any) -> list[Any]:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError
        return ["built"]

    model = tiny("llama")
    CacheMaker(model, METHOD, build).put()
    with pytest.raises(KeyError):
        model.make_cache()
    assert model.make_cache() == ["built"]


def test_an_attribute_that_was_there_before_is_used_and_put_back() -> None:
    model = tiny("llama")

    def theirs() -> list[Any]:
        return [RotatingKVCache(8)]

    model.make_cache = theirs
    maker = CacheMaker(model, METHOD, lambda model: [])
    maker.put()
    assert types(native_caches(model)) == [RotatingKVCache]
    maker.remove()
    assert model.make_cache is theirs


def test_an_attribute_that_came_afterwards_stays() -> None:
    model = tiny("llama")
    maker = CacheMaker(model, METHOD, lambda model: [])
    maker.put()
    model.make_cache = theirs = list
    maker.remove()
    assert model.make_cache is theirs


def test_a_maker_does_not_keep_its_model() -> None:
    model = tiny("llama")
    maker = CacheMaker(model, METHOD, lambda model: [])
    maker.put()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(UnsupportedModel, match="is gone"):
        maker()
    maker.remove()


def test_a_copy_of_a_model_has_a_maker_of_its_own() -> None:
    model = tiny("llama")
    maker = CacheMaker(model, METHOD, lambda model: [id(model)])
    maker.put()
    twin = copy.deepcopy(model)
    assert attached_to(twin) is not maker
    assert twin.make_cache() == [id(twin)]
    assert model.make_cache() == [id(model)]
    assert copy.deepcopy(maker) is maker
