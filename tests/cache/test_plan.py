from __future__ import annotations

import logging
from typing import Any

import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from kvcompress.cache import plan
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.nested import leaves
from kvcompress.cache.plan import make_plan
from kvcompress.codec import KVCodec
from kvcompress.errors import ConfigError, UnsupportedModel
from kvcompress.layers import LayerSpec
from tests.toy_model import Bundling, Near, ordinary
from tests.zoo import tiny


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_told", set())


def compressed(method: Near, model: Any) -> list[int]:
    caches = make_plan(method, model).caches(model)
    return [i for i, cache in enumerate(caches) if isinstance(cache, CompressedKVCache)]


def test_caches_are_those_of_the_plan_and_fresh_every_time() -> None:
    model, method = tiny("gemma3_text"), Near(window=9)
    made = make_plan(method, model)
    first, second = made.caches(model), made.caches(model)
    kinds = [RotatingKVCache, RotatingKVCache, CompressedKVCache] * 2
    assert [type(c) for c in first] == [type(c) for c in second] == kinds
    for i in (2, 5):
        assert first[i] is not second[i]
        assert first[i].method is method
        assert first[i].layer.index == i
        assert first[i].codec is second[i].codec
    assert first[0].max_size == 8


@pytest.mark.parametrize(
    ("skip", "expected"),
    [(0, [1, 3, 5]), (1, [3]), ((1, 0), [3, 5]), ((0, 1), [1, 3]), ((2, 0), [5])],
)
def test_skip_layers_counts_the_layers_that_can_be_compressed(
    skip: Any, expected: list[int]
) -> None:
    layer_types = ["sliding_attention", "full_attention"] * 3
    model = tiny("olmo3", num_hidden_layers=6, layer_types=layer_types)
    assert compressed(Near(skip_layers=skip), model) == expected


def test_a_skipped_layer_is_as_the_model_makes_it() -> None:
    model = tiny("llama")
    caches = make_plan(Near(skip_layers=(1, 2)), model).caches(model)
    assert [type(c) for c in caches] == [KVCache, CompressedKVCache, KVCache, KVCache]


def test_bundled_caches_are_those_of_the_plan_in_the_bundles_that_the_model_makes() -> None:
    model = Bundling(ordinary)
    made = make_plan(Near(), model)
    first, second = made.caches(model), made.caches(model)
    assert [type(c) for c in first] == [CacheList, CompressedKVCache, CacheList]
    assert [type(c) for c in first[0].caches] == [CompressedKVCache, ArraysCache, CompressedKVCache]
    assert [c.layer.index for c in leaves(first) if type(c) is CompressedKVCache] == [0, 3, 1, 2]
    assert not {*map(id, leaves(first))} & {*map(id, leaves(second))}


def test_skip_layers_counts_bundled_layers_one_by_one() -> None:
    model = Bundling(ordinary)
    caches = make_plan(Near(skip_layers=1), model).caches(model)
    kinds = [type(c) for c in leaves(caches)]
    assert kinds == [KVCache, ArraysCache, CompressedKVCache, CompressedKVCache, KVCache]


@pytest.mark.parametrize("skip", [2, (4, 0), (0, 4), (3, 1), (9, 9)])
def test_skip_layers_must_leave_one(skip: Any) -> None:
    with pytest.raises(ConfigError, match=r"near: skip_layers must leave one of the 4 layers"):
        make_plan(Near(skip_layers=skip), tiny("llama"))


def test_a_model_with_nothing_to_compress_is_refused_with_the_reasons() -> None:
    with pytest.raises(UnsupportedModel, match=r"no layer of deepseek_v3 .*: 0-3 \(.*MLA"):
        make_plan(Near(), tiny("deepseek_v3"))
    with pytest.raises(UnsupportedModel, match=r"0, 2 \(ArraysCache.*; 1, 3 \(RotatingKVCache"):
        make_plan(Near(), tiny("recurrent_gemma"))


def test_each_layer_is_bound_once_with_what_the_trace_says() -> None:
    seen: list[LayerSpec] = []

    class Watched(Near):
        def bind(self, layer: LayerSpec) -> KVCodec:
            seen.append(layer)
            return super().bind(layer)

    model = tiny("smollm3")
    made = make_plan(Watched(), model)
    made.caches(model)
    made.caches(model)
    assert [layer.index for layer in seen] == [0, 1, 2, 3]
    assert [layer.rotary is None for layer in seen] == [False, True] * 2


def test_what_stays_plain_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("gemma3_text")
    with caplog.at_level(logging.INFO, "kvcompress"):
        make_plan(Near(), model)
        make_plan(Near(), model)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "near on gemma3_text: 2 of 6 layers compressed (2, 5); left as the model makes them: "
        "0-1, 3-4 (RotatingKVCache: its sliding window bounds it)"
    )


@pytest.mark.parametrize(
    ("family", "told"),
    [
        (
            "falcon_h1",
            "4 of 4 layers compressed (0-3); left as the model makes them: 0-3 (ArraysCache: it "
            "holds a recurrent state, which does not grow)",
        ),
        (
            "baichuan_m1",
            "2 of 4 layers compressed (0, 2); left as the model makes them: 0-3 (ArraysCache: it "
            "holds a recurrent state, which does not grow); 1, 3 (RotatingKVCache: its sliding "
            "window bounds it)",
        ),
    ],
)
def test_what_stays_plain_of_a_bundle_is_told(
    family: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_plan(Near(), tiny(family))
    (record,) = caplog.records
    assert record.getMessage() == f"near on {family}: {told}"


def test_attention_that_decodes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    make_plan(Near(), tiny("gemma2"))
    (record,) = caplog.records
    assert "compressed at rest only: 0-3 (its attention is the model's own" in record.getMessage()


def test_a_model_compressed_throughout_is_no_matter_for_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "kvcompress"):
        make_plan(Near(), tiny("llama"))
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() == "near on llama: 4 of 4 layers compressed (0-3)"


def test_a_model_that_makes_other_caches_than_before_is_refused() -> None:
    model = tiny("llama")
    made = make_plan(Near(), model)
    model.make_cache = lambda: [KVCache()]
    with pytest.raises(UnsupportedModel, match="makes 1 caches, but made 4"):
        made.caches(model)
    for entries in ([RotatingKVCache(8)] * 4, [CacheList(*[RotatingKVCache(8)] * 4)]):
        model.make_cache = entries.copy
        with pytest.raises(UnsupportedModel, match=r"entry 0 .* is a RotatingKVCache, but was"):
            made.caches(model)


def test_a_part_of_a_pipeline_is_refused() -> None:
    model: Any = tiny("qwen2")
    model.model.pipeline_size = 2
    with pytest.raises(UnsupportedModel, match=r"a pipeline of 2 processes.*model\.shard"):
        make_plan(Near(), model)
