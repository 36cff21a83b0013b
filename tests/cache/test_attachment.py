from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache

import kvcompress
from kvcompress import attach, detach, make_cache
from kvcompress.cache import CompressedKVCache
from kvcompress.cache.batch import CompressedBatchCache
from kvcompress.cache.dispatch import modules_of
from kvcompress.cache.native import native_caches
from kvcompress.cache.nested import leaves
from kvcompress.cache.step import Step
from kvcompress.cache.trace import trace
from kvcompress.errors import BrokenPlugin, ConfigError
from tests.toy_model import Near
from tests.zoo import logits, tiny

CHUNKS = (7, 7, 6, 1, 1, 1, 5, 1)
TOKENS = mx.array([[(7 * i * i + 3 * i) % 61 + 2 for i in range(sum(CHUNKS))]])
SPARES_NOTHING = Near(window=3, sinks=1, block=16)
KEEPS_ALL = Near(window=sum(CHUNKS))


def run(model: nn.Module, caches: list[Any], chunks: Sequence[int] = CHUNKS) -> mx.array:
    """Logits of all chunks, each computed before the next."""
    start, out = 0, []
    for count in chunks:
        out.append(logits(model, TOKENS[:, start : start + count], caches))
        mx.eval(out[-1], [cache.state for cache in caches])
        start += count
    return mx.concatenate(out, axis=1)


def greedy(model: nn.Module, **options: Any) -> list[int]:
    steps = generate_step(TOKENS[0, :21], model, max_tokens=8, prefill_step_size=6, **options)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("family", ["llama", "gemma3n", "afm7", "gemma2"])
def test_attention_meets_the_codes_once_a_reader_and_step(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []
    attend_as_before = Step.attend

    def attend(self: Step, queries: mx.array, **call: Any) -> mx.array:
        calls.append(call["scale"])
        return attend_as_before(self, queries, **call)

    monkeypatch.setattr(Step, "attend", attend)
    model = tiny(family)
    run(model, make_cache(SPARES_NOTHING, model))
    readers = sum(s.readers for s in trace(model) if s.query_visible)
    assert len(calls) == readers * len(CHUNKS)
    assert set(calls) <= {s.scale for s in trace(model)}


def contents(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(dict(m), dict(vars(m))) for m in modules_of(model)]


def assert_unchanged(model: nn.Module, before: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for then, now in zip(before, contents(model), strict=True):
        for a, b in zip(then, now, strict=True):
            assert list(a) == list(b)
            assert all(a[k] is b[k] for k in a)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "qwen3_next"])
def test_detaching_leaves_model_class_and_module_as_they_were(family: str) -> None:
    model = tiny(family)
    module = sys.modules[type(model).__module__]
    before = contents(model), dict(vars(type(model))), dict(vars(module))
    expected = run(model, native_caches(model))
    with attach(model, SPARES_NOTHING):
        caches = make_prompt_cache(model)
        assert any(isinstance(cache, CompressedKVCache) for cache in caches)
        run(model, caches)
    del caches
    gc.collect()
    assert_unchanged(model, before[0])
    assert dict(vars(type(model))) == before[1]
    assert dict(vars(module)) == before[2]
    assert [type(c) for c in make_prompt_cache(model)] == [type(c) for c in native_caches(model)]
    assert mx.array_equal(run(model, native_caches(model)), expected)


def test_a_conversation_goes_on_after_its_method_was_detached() -> None:
    model = tiny("llama")
    expected = run(model, make_cache(SPARES_NOTHING, model))
    with attach(model, SPARES_NOTHING):
        caches = model.make_cache()
        first = run(model, caches, CHUNKS[:4])
    gc.collect()
    rest = logits(model, TOKENS[:, first.shape[1] : first.shape[1] + 1], caches)
    assert mx.array_equal(rest, expected[:, first.shape[1] : first.shape[1] + 1])


def test_attention_stays_hooked_as_long_as_a_cache_lives() -> None:
    model = tiny("starcoder2")
    module = sys.modules[type(model).__module__]
    original = module.scaled_dot_product_attention
    caches = make_cache(KEEPS_ALL, model)
    assert module.scaled_dot_product_attention is not original
    del caches[1:]
    gc.collect()
    assert module.scaled_dot_product_attention is not original
    del caches
    gc.collect()
    assert module.scaled_dot_product_attention is original


def test_generation_makes_compressed_caches_while_attached() -> None:
    model = tiny("llama")
    caches = native_caches(model)
    plain = greedy(model, prompt_cache=caches)
    offsets = [cache.offset for cache in caches]
    with attach(model, KEEPS_ALL):
        assert greedy(model) == plain
        caches = make_prompt_cache(model)
        assert greedy(model, prompt_cache=caches) == plain
    assert [(type(c), c.offset) for c in caches] == [(CompressedKVCache, n) for n in offsets]


def test_kv_bits_leaves_compressed_caches_alone() -> None:
    model = tiny("llama")
    caches = make_cache(SPARES_NOTHING, model)
    expected = greedy(model)
    assert greedy(model, prompt_cache=caches, kv_bits=8, quantized_kv_start=0) == expected
    assert all(type(cache) is CompressedKVCache for cache in caches)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "cohere2",
        "gemma3_text",
        "qwen3_next",
        "gemma3n",
        "afm7",
        "falcon_h1",
        "baichuan_m1",
    ],
)
def test_batches_are_of_compressed_caches_and_rows_as_if_alone(family: str) -> None:
    model = tiny(family)
    prompts = [[3, 1, 4, 1, 5] * 6, [9, 2, 6, 5] * 4, [35] * 3]
    if family == "baichuan_m1":  # mlx-lm takes its convolution's state from padding
        prompts = [(prompt * 6)[:16] for prompt in prompts]

    def answers() -> tuple[dict[int, list[int]], set[type]]:
        generator = BatchGenerator(model, max_tokens=6, prefill_step_size=8)
        out: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts)}
        kinds: set[type] = set()
        while not all(len(tokens) == 6 for tokens in out.values()):
            for response in generator.next_generated():
                out[response.uid].append(response.token)
            kinds |= {type(c) for c in leaves(generator._generation_batch.prompt_cache)}
        generator.close()
        return out, kinds

    expected, _ = answers()
    with attach(model, SPARES_NOTHING):
        batched, kinds = answers()
    assert CompressedBatchCache in kinds
    assert BatchKVCache not in kinds
    assert batched == expected


def test_leaving_by_an_error_detaches() -> None:
    model = tiny("llama")
    with pytest.raises(KeyError), attach(model, KEEPS_ALL):
        raise KeyError
    assert "make_cache" not in vars(model)


def test_attaching_twice_is_refused_and_names_the_way_out() -> None:
    model = tiny("llama")
    attach(model, KEEPS_ALL)
    with pytest.raises(ConfigError, match=r"near is attached .* call kvcompress.detach\(model\)"):
        attach(model, SPARES_NOTHING)
    assert model.make_cache()[0].method is KEEPS_ALL
    detach(model)
    detach(model)
    attach(model, SPARES_NOTHING)
    assert model.make_cache()[0].method is SPARES_NOTHING
    detach(model)


def test_a_block_that_was_left_early_does_not_take_the_next_method_off() -> None:
    model = tiny("llama")
    with attach(model, KEEPS_ALL) as attachment:
        attachment.detach()
        attach(model, SPARES_NOTHING)
    assert model.make_cache()[0].method is SPARES_NOTHING
    detach(model)


def test_a_wrapper_and_its_language_model_are_two_models() -> None:
    model = tiny("gemma3")
    inner = attach(model.language_model, KEEPS_ALL)
    with pytest.raises(ConfigError, match="part of the model"):
        attach(model, KEEPS_ALL)
    inner.detach()
    with attach(model, KEEPS_ALL):
        kinds = [RotatingKVCache, CompressedKVCache] * 2
        assert [type(cache) for cache in model.make_cache()] == kinds
        kinds = [RotatingKVCache, KVCache] * 2
        assert [type(cache) for cache in model.language_model.make_cache()] == kinds


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attach: model must be an mlx.nn.Module \(got Near\)"):
        attach(KEEPS_ALL, tiny("llama"))  # type: ignore[arg-type]


def test_an_attached_model_saves_quantises_and_freezes_as_ever(tmp_path: Any) -> None:
    model = tiny("llama")
    names = [name for name, _ in tree_flatten(model.parameters())]
    expected = run(model, native_caches(model))
    with attach(model, KEEPS_ALL):
        assert [name for name, _ in tree_flatten(model.parameters())] == names
        model.save_weights(str(tmp_path / "weights.safetensors"))
        model.freeze()
        model.load_weights(str(tmp_path / "weights.safetensors"))
        assert mx.array_equal(run(model, model.make_cache()), expected)
        nn.quantize(model, group_size=32, bits=8)
        assert mx.array_equal(run(model, model.make_cache()), run(model, native_caches(model)))


@pytest.mark.parametrize(
    "make", [KVCache, lambda: RotatingKVCache(64, keep=4), lambda: KVCache().to_quantized(32, 8)]
)
def test_other_caches_compute_the_same_bits_beside_ours(make: Any) -> None:
    model = tiny("llama", hidden_size=128, head_dim=32)
    expected = run(model, [make() for _ in model.layers])
    with attach(model, SPARES_NOTHING):
        run(model, model.make_cache())
        assert mx.array_equal(run(model, [make() for _ in model.layers]), expected)


def test_a_list_may_hold_ours_beside_others() -> None:
    model = tiny("llama")
    expected = run(model, native_caches(model))
    caches = [ours if i % 2 else KVCache() for i, ours in enumerate(make_cache(KEEPS_ALL, model))]
    assert mx.array_equal(run(model, caches), expected)


def test_two_models_of_a_family_take_turns() -> None:
    ours, theirs = tiny("llama"), tiny("llama", rope_theta=500.0)
    expected = [run(ours, make_cache(SPARES_NOTHING, ours)), run(theirs, native_caches(theirs))]
    with attach(ours, SPARES_NOTHING):
        caches = [make_prompt_cache(ours), make_prompt_cache(theirs)]
        assert type(caches[1][0]) is KVCache
        out: list[list[mx.array]] = [[], []]
        start = 0
        for count in CHUNKS:
            for i, model in enumerate((ours, theirs)):
                out[i].append(logits(model, TOKENS[:, start : start + count], caches[i]))
                mx.eval(out[i][-1])
            start += count
    for parts, whole in zip(out, expected, strict=True):
        assert mx.array_equal(mx.concatenate(parts, axis=1), whole)


def test_threads_share_an_attached_model_each_with_its_own_conversation() -> None:
    model = tiny("llama")
    expected = np.array(run(model, make_cache(SPARES_NOTHING, model)))
    plain = np.array(run(model, native_caches(model)))
    attach(model, SPARES_NOTHING)
    wrong: list[object] = []

    def talk(own: bool) -> None:
        for _ in range(3):
            caches = model.make_cache() if own else native_caches(model)
            out = np.array(run(model, caches))
            if not np.array_equal(out, expected if own else plain):
                wrong.append(out)

    threads = [threading.Thread(target=talk, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    detach(model)
    assert not wrong


def test_caches_made_in_one_thread_are_used_in_another() -> None:
    model = tiny("llama")
    expected = np.array(run(model, make_cache(SPARES_NOTHING, model)))
    caches, seen = make_cache(SPARES_NOTHING, model), []
    thread = threading.Thread(target=lambda: seen.append(np.array(run(model, caches))))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(seen[0], expected)


class AskedFor(KVCache):
    """What a method made itself."""


class Asked(Near):
    """Makes its caches itself, from those of the model."""

    def make_cache(self, model: Any) -> list[Any]:
        return [AskedFor() for _ in make_prompt_cache(model)]


class Passes(Near):
    """Overrides ``make_cache`` and then asks for the common one."""

    def make_cache(self, model: Any) -> list[Any]:
        return [*make_cache(self, model)[:2], *native_caches(model)[2:]]


def test_a_method_that_makes_its_own_caches_is_asked() -> None:
    model = tiny("llama")
    asked = [AskedFor] * 4
    assert _kinds(make_cache(Asked(), model)) == asked
    with attach(model, Asked()):
        assert _kinds(model.make_cache()) == _kinds(make_prompt_cache(model)) == asked
    halved = [CompressedKVCache] * 2 + [KVCache] * 2
    assert _kinds(make_cache(Passes(), model)) == halved
    with attach(model, Passes()):
        assert _kinds(model.make_cache()) == halved


def _kinds(caches: list[Any]) -> list[type]:
    return [type(cache) for cache in caches]


def test_a_method_that_makes_its_own_caches_may_fail_and_be_asked_again() -> None:
    class Fails(Near):
        def make_cache(self, model: Any) -> list[Any]:
            raise KeyError(len(model.layers))

    method = Fails()
    for _ in range(2):
        with pytest.raises(BrokenPlugin, match=r"near: make_cache failed \(KeyError: 4\)"):
            make_cache(method, tiny("llama"))


def test_the_methods_own_call_makes_the_same() -> None:
    model = tiny("llama")
    assert [type(c) for c in KEEPS_ALL.make_cache(model)] == [CompressedKVCache] * 4
    with attach(model, SPARES_NOTHING):
        assert KEEPS_ALL.make_cache(model)[0].method is KEEPS_ALL


def test_the_public_names_are_these_functions() -> None:
    assert kvcompress.attach is attach
    assert callable(kvcompress.report)
    assert kvcompress.report(make_cache(KEEPS_ALL, tiny("llama"))).plain_layers == 0
