from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from attrs import evolve, frozen
from mlx_lm.models.cache import KVCache

import kvcompress as kv
from kvcompress.cache.binding import bound
from kvcompress.cache.native import native_caches
from kvcompress.layers import LayerSpec
from kvcompress.method import Method
from tests.made_up import METHODS, words
from tests.stand_ins import LAYER, StandIn
from tests.zoo import tiny


@frozen(kw_only=True)
class Odd(Method):
    name: ClassVar[str] = "odd"
    given: Any = None

    def bind(self, layer: LayerSpec) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def test_a_sound_codec_passes() -> None:
    assert bound(StandIn(), LAYER).layer == LAYER


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, r"must return a KVCodec \(got None\)"),
        (("codec", 4), "must return a KVCodec"),
        (StandIn().bind(evolve(LAYER, head_dim=64)), "must return a codec of LayerSpec"),
        (ZeroDivisionError("by zero"), r"failed \(ZeroDivisionError: by zero\)"),
    ],
)
def test_a_plugin_without_a_codec_is_broken(given: Any, text: str) -> None:
    with pytest.raises(kv.BrokenPlugin, match=f"odd: bind of layer 0 {text}"):
        bound(Odd(given=given), LAYER)
    model = tiny("llama")
    for give in (kv.attach, lambda model, method: kv.make_cache(method, model)):
        with pytest.raises(kv.BrokenPlugin, match="odd: bind of layer 0"):
            give(model, Odd(given=given))


@frozen(kw_only=True)
class OwnMaker(Odd):
    def make_cache(self, model: Any) -> Any:
        return self.bind(LAYER)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (5, "must return a list of 4 caches, as the model makes"),
        ([KVCache() for _ in range(3)], "must return a list of 4 caches"),
        ([KVCache() for _ in range(5)], "must return a list of 4 caches"),
        ([KVCache(), KVCache(), KVCache(), None], "must return a list of 4 caches"),
        (ZeroDivisionError("by zero"), r"failed \(ZeroDivisionError: by zero\)"),
    ],
)
def test_a_plugin_without_caches_is_broken(given: Any, text: str) -> None:
    model = tiny("llama")
    with pytest.raises(kv.BrokenPlugin, match=f"odd: make_cache {text}"):
        kv.make_cache(OwnMaker(given=given), model)
    attached = kv.attach(model, OwnMaker(given=given))
    with attached, pytest.raises(kv.BrokenPlugin, match=f"odd: make_cache {text}"):
        model.make_cache()


def test_an_error_of_ours_passes_as_it_is() -> None:
    with pytest.raises(kv.CalibrationRequired, match=r"^as it is$"):
        bound(Odd(given=kv.CalibrationRequired("as it is")), LAYER)


@pytest.mark.parametrize("method", ["turboquant", None, Odd, object()])
def test_what_is_no_configured_method_is_refused_by_name(method: Any) -> None:
    model = tiny("llama")
    with pytest.raises(kv.ConfigError, match=r"attach: method must be .*kvcompress\.get_method"):
        kv.attach(model, method)
    with pytest.raises(kv.ConfigError, match="make_cache: method must be"):
        kv.make_cache(method, model)


@pytest.mark.parametrize("model", [None, "smollm2-135m", object()])
def test_what_is_no_model_is_refused_by_name(model: Any) -> None:
    for who, give in {
        "attach": lambda: kv.attach(model, Odd()),
        "detach": lambda: kv.detach(model),
        "make_cache": lambda: native_caches(model),
    }.items():
        with pytest.raises(kv.ConfigError, match=rf"{who}: model must be an mlx\.nn\.Module"):
            give()
    with pytest.raises(kv.ConfigError, match="make_cache: model must be"):
        kv.make_cache(Odd(), model)


@pytest.mark.parametrize("caches", [None, 5, "abc", [None]])
def test_what_is_no_list_of_caches_is_refused_by_name(caches: Any, tmp_path: Path) -> None:
    with pytest.raises(kv.ConfigError, match="report: caches must be the list"):
        kv.report(caches)
    with pytest.raises(kv.ConfigError, match="save_cache: caches must be the list"):
        kv.save_cache(tmp_path / "a.safetensors", caches)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("family", "dim", "fields"),
    [
        ("phi3", 96, {"hidden_size": 384, "num_key_value_heads": 4}),
        ("llama", 80, {"head_dim": 80}),
        ("llama", 112, {"head_dim": 112}),
    ],
)
def test_odd_heads_work_or_are_refused_before_the_model_runs(
    family: str, dim: int, fields: dict[str, Any], name: str
) -> None:
    model = tiny(family, **fields)
    method = kv.get_method(name, window=8, block=16, sinks=1, **METHODS[name])
    if name == "affine" and dim % 32:
        with pytest.raises(kv.ConfigError, match=rf"multiple of 32 .* has {dim}"):
            kv.make_cache(method, model)
        return
    caches = kv.make_cache(method, model)
    for count in (90, 1, 1, 7):
        out = model(words(count)[None], cache=caches)
        assert mx.isfinite(out).all()
    if name != "fp16":
        assert {(cache.layer.head_dim, cache.tokens_coded) for cache in caches} == {(dim, 80)}
