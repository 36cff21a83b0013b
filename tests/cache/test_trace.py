from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama as llama_module
from mlx_lm.models.cache import CacheList, KVCache

from kvcompress.cache.dispatch import modules_of
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.nested import leaves
from kvcompress.cache.trace import trace
from kvcompress.errors import ConfigError, UnsupportedModel
from kvcompress.layers import LayerSpec, Rotary
from tests.stand_ins import cache as compressed_cache
from tests.toy_model import Attention, Bundling, Toy, ordinary
from tests.zoo import FAMILIES, logits, tiny

# Every cache holds a latent, a recurrent state, a window, or several of them.
NOTHING = {
    "bailing_hybrid",
    "bailing_moe_v3",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v41",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k25",
    "kimi_k3",
    "kimi_linear",
    "kimi_vl",
    "longcat_flash",
    "longcat_flash_ngram",
    "mamba",
    "mamba2",
    "mistral4",
    "recurrent_gemma",
    "rwkv7",
}
OWN_ATTENTION = {"gemma2", "plamo", "plamo2", "stablelm"}
HALF_OWN_ATTENTION = {"phi3small"}
# Norm after rotation, or a rotated slice joined to the rest.
UNKNOWN_ROTATION = {
    "afm7",
    "deepseek_v2",
    "gptj",
    "hunyuan",
    "hunyuan_v1_dense",
    "minicpm3",
    "nanochat",
    "talkie",
    "youtu_llm",
}
NO_ROTATION = {
    "afmoe",
    "cohere2",
    "exaone4",
    "exaone_moe",
    "gpt2",
    "gpt_bigcode",
    "jamba",
    "llama4",
    "muse_glimmer",
    "nemotron_h",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learnt_of_a_family(family: str) -> None:
    model = tiny(family)
    made = model.make_cache() if hasattr(model, "make_cache") else [KVCache()] * len(model.layers)
    slots = trace(model)
    places = [place for place, entry in enumerate(made) for _ in leaves([entry])]
    assert [slot.index for slot in slots] == places
    for slot, cache in zip(slots, leaves(made), strict=True):
        assert (slot.kind == "plain") == (type(cache) is not KVCache)
        assert bool(slot.reason) == (slot.kind != "compress" or not slot.query_visible)
    fit = [slot for slot in slots if slot.kind == "compress"]
    assert bool(fit) == (family not in NOTHING)
    for slot in fit:
        layer = slot.layer
        assert layer is not None
        assert layer.index == slot.index
        assert layer.dtype == "float32"
        if family not in HALF_OWN_ATTENTION:
            assert slot.query_visible == (family not in OWN_ATTENTION)
        assert slot.readers >= 1
        assert layer.rotary_known == (family not in UNKNOWN_ROTATION)
        if family in NO_ROTATION | UNKNOWN_ROTATION:
            assert layer.rotary is None


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_layers_of_one_model_have_each_their_own_rotation() -> None:
    bases = [slot.layer.rotary for slot in trace(tiny("smollm3")) if slot.layer]
    assert bases == [Rotary(16, base=10000.0), None] * 2
    (full,) = {
        slot.layer.rotary
        for slot in trace(tiny("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4))
        if slot.layer
    }
    assert full == Rotary(16, base=1e6)


@pytest.mark.parametrize("family", ["llama", "internlm3"])
def test_a_rotation_that_changes_with_the_context_is_unknown(family: str) -> None:
    slots = trace(tiny(family, rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    assert all(s.layer and s.layer.rotary is None and not s.layer.rotary_known for s in slots)


@pytest.mark.model
def test_the_embedded_model_is_learnt_in_full(demo: tuple[Any, Any]) -> None:
    slots = trace(demo[0])
    assert [(slot.kind, slot.query_visible, slot.scale) for slot in slots] == [
        ("compress", True, 0.125)
    ] * 30
    for slot in slots:
        rotary = Rotary(64, base=1e5)
        assert slot.layer == LayerSpec(slot.index, 3, 9, 64, 64, "float32", rotary, True)


def test_bundled_caches_are_learnt_one_by_one_and_every_layer_has_a_number_of_its_own() -> None:
    slots = trace(Bundling(ordinary))
    assert [slot.index for slot in slots] == [0, 0, 0, 1, 2]
    assert [slot.layer and slot.layer.index for slot in slots] == [0, None, 3, 1, 2]
    assert [slot.kind for slot in slots] == ["compress", "plain", *["compress"] * 3]
    assert all(slot.layer.rotary == Rotary(8, base=100.0) for slot in slots if slot.layer)


def test_bundled_arrays_that_a_model_takes_leave_their_layer_plain() -> None:
    for family in ("deepseek_v32", "minimax_m3_vl"):
        slots = trace(tiny(family))
        both = [s for s in slots if [other.index for other in slots].count(s.index) == 2]
        assert both
        assert all("past the cache's interface" in slot.reason for slot in both)


def test_layers_that_share_a_cache_are_counted() -> None:
    assert [slot.readers for slot in trace(tiny("afm7"))] == [3]
    assert [slot.readers for slot in trace(tiny("gemma3n"))] == [0, 1, 0, 2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_dtype_is_the_models_also_after_it_changes(dtype: str) -> None:
    model = tiny("qwen3")
    assert {slot.layer.dtype for slot in trace(model) if slot.layer} == {"float32"}
    model.set_dtype(getattr(mx, dtype))
    assert {slot.layer.dtype for slot in trace(model) if slot.layer} == {dtype}


def test_a_quantised_model_is_learnt_as_any_other() -> None:
    model = tiny("llama")
    plain = trace(model)
    nn.quantize(model, group_size=32, bits=4)
    assert trace(model) == plain


def test_a_trace_is_kept_until_a_module_is_replaced_or_the_model_goes() -> None:
    model = tiny("llama")
    slots = trace(model)
    assert trace(model) is slots
    model.model.layers[1].self_attn.rope = nn.RoPE(16, base=77.0)
    again = trace(model)
    assert [slot.layer.rotary.base for slot in again if slot.layer and slot.layer.rotary] == [
        10000.0,
        77.0,
        10000.0,
        10000.0,
    ]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def from_another_thread(build: Any) -> Any:
    """What ``build`` makes there; lazy arrays of that thread cannot be computed here."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(build()))
    thread.start()
    thread.join()
    return made[0]


def test_no_weight_is_computed() -> None:
    args = llama_module.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=64,
    )
    model = from_another_thread(lambda: llama_module.Model(args))
    weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(RuntimeError):
        mx.eval(weight)
    assert [slot.kind for slot in trace(model)] == ["compress"] * 2


def test_a_rotation_table_left_uncomputed_in_another_thread_is_a_clear_error() -> None:
    model = from_another_thread(lambda: tiny("llama", rope_scaling=LLAMA3))
    with pytest.raises(UnsupportedModel, match="run the model once in the thread that loaded it"):
        trace(model)


def test_memory_stays_where_it_was() -> None:
    model = tiny("qwen3", hidden_size=512, intermediate_size=1024)
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    trace(model)
    assert mx.get_peak_memory() - held < 16 << 10
    assert mx.get_active_memory() - held < 1 << 10


def contents(model: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(dict(module), dict(vars(module))) for module in modules_of(model)]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(a[k] is b[k] for k in a)


@pytest.mark.parametrize("family", ["llama", "gemma3n", "phi", "qwen3_next", "dbrx"])
def test_the_model_its_modules_and_rope_are_left_as_they_were(family: str) -> None:
    model = tiny(family)
    model.train()
    module = __import__(type(model).__module__, fromlist=["scaled_dot_product_attention"])
    before, attention, rope = contents(model), module.scaled_dot_product_attention, mx.fast.rope
    trace(model)
    after = contents(model)
    for (a, b), (c, d) in zip(before, after, strict=True):
        assert same(a, c)
        assert same(b, d)
    assert module.scaled_dot_product_attention is attention
    assert mx.fast.rope is rope


def test_an_array_that_a_module_keeps_from_the_run_is_taken_back() -> None:
    def layer(x: mx.array, cache: Any, attention: Attention) -> mx.array:
        model.kept = x + 1
        model.__dict__["kept_as_attribute"] = x + 1
        return ordinary(x, cache, attention)

    model = Toy(layer)
    assert trace(model)[0].kind == "compress"
    assert "kept" not in model
    assert "kept_as_attribute" not in vars(model)


def test_no_random_number_is_drawn_from_a_model_in_training() -> None:
    model = tiny("llama")
    model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, nn.Dropout(0.5))
    model.lm_head = nn.Linear(64, 64)
    model.args.tie_word_embeddings = False
    model.train()
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(4,))
    mx.random.seed(5)
    trace(model)
    assert mx.array_equal(mx.random.uniform(shape=(4,)), expected)


def test_a_model_that_fails_is_an_unsupported_one_and_everything_is_restored() -> None:
    def layer(x: mx.array, cache: Any, attention: Attention) -> mx.array:
        ordinary(x, cache, attention)
        raise IndexError("out of tables")

    rope, attention = mx.fast.rope, Toy.__call__.__globals__["scaled_dot_product_attention"]
    with pytest.raises(UnsupportedModel) as failure:
        trace(Toy(layer))
    # Restored while the failure, and with it the frames of the run, is still held.
    assert re.search(r"toy_model.*IndexError: out of tables", str(failure.value))
    assert mx.fast.rope is rope
    assert Toy.__call__.__globals__["scaled_dot_product_attention"] is attention


def test_a_model_that_fails_only_far_away_is_learnt_from_the_rest() -> None:
    def layer(x: mx.array, cache: Any, attention: Attention) -> mx.array:
        if cache.offset > 1000:
            raise IndexError("out of tables")
        return ordinary(x, cache, attention)

    (slot,) = trace(Toy(layer))
    assert slot.layer is not None
    assert slot.layer.rotary_known


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be an mlx.nn.Module \(got str\)"):
        trace("llama")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match="AttributeError"):
        trace(nn.Linear(2, 2))


def test_a_model_with_a_method_on_one_of_its_parts_is_refused() -> None:
    class Attached(Toy):
        def make_cache(self) -> list[CompressedKVCache]:
            return [compressed_cache()]

    class Within(Toy):
        def make_cache(self) -> list[CacheList]:
            return [CacheList(compressed_cache())]

    for kind in (Attached, Within):
        with pytest.raises(ConfigError, match="attached to a part of the model"):
            trace(kind(ordinary))


def test_a_trace_beside_a_running_model_disturbs_neither() -> None:
    running, other = tiny("llama"), [tiny("llama", rope_theta=5e3 + i) for i in range(12)]
    tokens = mx.array([[1, 2, 3, 4]])
    expected = np.array(logits(running, tokens, running.make_cache()))
    wrong: list[object] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            out = np.array(logits(running, tokens, running.make_cache()))
            if not np.array_equal(out, expected):
                wrong.append(out)

    thread = threading.Thread(target=run)
    thread.start()
    learnt = [trace(model) for model in other]
    stop.set()
    thread.join()
    assert not wrong
    for i, slots in enumerate(learnt):
        assert all(s.layer and s.layer.rotary == Rotary(16, base=5e3 + i) for s in slots)
