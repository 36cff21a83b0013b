from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.cache.trace import trace
from kvcompress.calibrate import capture
from kvcompress.calibrate.capture import record
from kvcompress.calibrate.samples import LayerSamples
from kvcompress.errors import UnsupportedModel
from kvcompress.layers import Rotary
from tests.calibrate.fakes import PROSE, tiny_llama

WINDOWS = [list(PROSE[start : start + 70].encode()) for start in (0, 400)]
LATE = slice(4, None)


def projections(model: Any, layer: int, ids: list[int]) -> tuple[np.ndarray, ...]:
    """Queries, keys and values of a layer before RoPE, ``(T, heads, 8)``, by hand in float64."""
    from mlx_lm.models.base import create_attention_mask

    inner = model.model
    h = inner.embed_tokens(mx.array(ids)[None])
    mask = create_attention_mask(h)
    for block in inner.layers[:layer]:
        h = block(h, mask)
    block = inner.layers[layer]
    x = np.array(block.input_layernorm(h)[0], np.float64)
    attention = block.self_attn
    return tuple(
        (x @ np.array(p.weight, np.float64).T).reshape(len(ids), -1, 8)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_recorded_is_what_the_model_computes(layer: int) -> None:
    model = tiny_llama(seed=3)
    samples = record(model, WINDOWS)[layer]
    assert samples.layer.rotary == Rotary(8, base=1000.0)
    by_hand = [projections(model, layer, ids) for ids in WINDOWS]
    q, k, v = (np.concatenate([window[i][LATE] for window in by_hand]) for i in range(3))
    np.testing.assert_array_equal(samples.positions, np.tile(np.arange(4, 70), 2))
    np.testing.assert_allclose(samples.keys, k, atol=1e-5)
    np.testing.assert_allclose(samples.values, v, atol=1e-5)
    queries = q.reshape(-1, 2, 2, 8)  # query heads 0 and 1 read KV head 0
    np.testing.assert_allclose(samples.queries, queries, atol=1e-5)
    moment = np.einsum("nhgd,nhge->hde", queries, queries) / (2 * len(queries))
    np.testing.assert_allclose(samples.moments.query_moment, moment, atol=1e-5)
    np.testing.assert_allclose(samples.moments.key_mean, k.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(samples.moments.key_variance, k.var(axis=0), atol=1e-5)


def test_first_tokens_are_recorded_too_where_none_is_skipped() -> None:
    model = tiny_llama(seed=3)
    late, all_tokens = (record(model, WINDOWS, skip=skip)[1] for skip in (4, 0))
    np.testing.assert_array_equal(all_tokens.positions, np.tile(np.arange(70), 2))
    kept = all_tokens.positions >= 4
    np.testing.assert_array_equal(all_tokens.values[kept], late.values)
    assert all_tokens.moments.tokens == late.moments.tokens + 8
    assert len(all_tokens.queries) == len(late.queries) + 8


def test_the_forward_pass_is_the_plain_one_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    outputs = []
    original = type(model).__call__

    def keep(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        out = original(self, inputs, cache)
        if inputs.shape[1] > 3:  # not one of the trace's
            outputs.append(out)
        return out

    trace(model)
    monkeypatch.setattr(type(model), "__call__", keep)
    record(model, WINDOWS)
    monkeypatch.undo()
    assert len(outputs) == len(WINDOWS)
    for ids, out in zip(WINDOWS, outputs, strict=True):
        from mlx_lm.models.cache import make_prompt_cache

        assert mx.array_equal(out, model(mx.array(ids)[None], cache=make_prompt_cache(model)))


def test_a_window_may_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = record(tiny_llama(), WINDOWS)[1]
    monkeypatch.setattr(capture, "CHUNK", 23)
    cut = record(tiny_llama(), WINDOWS)[1]
    np.testing.assert_array_equal(cut.positions, whole.positions)
    np.testing.assert_allclose(cut.keys, whole.keys, atol=1e-5)
    np.testing.assert_allclose(cut.queries, whole.queries, atol=1e-5)


def test_the_sample_keeps_to_its_bytes_and_is_the_same_for_every_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = 4 * 2 * (8 + 8) * 2  # keys and values of two heads and two layers, float32
    monkeypatch.setattr(capture, "SAMPLE_BYTES", 20 * row + 3)
    first, second = record(tiny_llama(), WINDOWS)
    assert len(first.keys) == len(first.values) == len(first.positions) == 20
    np.testing.assert_array_equal(first.positions, second.positions)
    assert first.moments.tokens == second.moments.tokens == 2 * 66
    other = record(tiny_llama(), WINDOWS, seed=1)[0]
    assert not np.array_equal(first.positions, other.positions)
    np.testing.assert_array_equal(first.moments.key_mean, other.moments.key_mean)


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "SAMPLE_BYTES", 1 << 14)
    model = tiny_llama()
    ids = list((PROSE * 2)[:600].encode())

    def peak(windows: int) -> int:
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        record(model, [ids] * windows)
        return mx.get_peak_memory() - before

    peak(1)
    assert peak(8) <= 1.2 * peak(2)


def test_progress_counts_tokens() -> None:
    seen: list[tuple[str, int, int]] = []
    record(tiny_llama(), WINDOWS, progress=lambda *step: seen.append(step))
    assert seen == [("recording", done, 140) for done in (0, 70, 140)]


def test_the_model_is_left_as_it_was() -> None:
    from mlx_lm.models import llama

    model = tiny_llama()
    attention, attributes = llama.scaled_dot_product_attention, dict(vars(model))
    record(model, WINDOWS)
    assert llama.scaled_dot_product_attention is attention
    assert dict(vars(model)) == attributes
    with pytest.raises(TypeError):
        record(model, [None])  # type: ignore[list-item]
    assert llama.scaled_dot_product_attention is attention


def test_a_model_without_a_cache_to_compress_is_refused() -> None:
    from tests.zoo import tiny

    with pytest.raises(UnsupportedModel, match="no layer of the model"):
        record(tiny("deepseek_v3"), WINDOWS)


def shapes(samples: LayerSamples) -> tuple[tuple[int, ...], ...]:
    return samples.keys.shape, samples.values.shape, samples.queries.shape


@pytest.mark.parametrize(
    "family",
    ["qwen3", "phi", "gemma3_text", "smollm3", "gpt2", "falcon_h1", "baichuan_m1", "minimax_m3_vl"],
)
def test_other_families_are_recorded(family: str) -> None:
    from tests.zoo import tiny

    model = tiny(family)
    for samples in record(model, [[1, 2, 3, 4, 5, 6, 7] * 5]):
        layer = samples.layer
        H, G, D = layer.kv_heads, layer.group, layer.head_dim
        assert shapes(samples) == ((31, H, D), (31, H, layer.value_dim), (31, H, G, D))
        assert samples.moments.queries == 31 * G


def test_queries_of_every_layer_that_reads_a_cache_are_recorded() -> None:
    from tests.zoo import tiny

    model = tiny("gemma3n")
    readers = {slot.index: slot.readers for slot in trace(model) if slot.layer}
    assert max(readers.values()) > 1
    for samples in record(model, [[1, 2, 3, 4, 5, 6, 7] * 5]):
        count = 31 * readers[samples.layer.index]
        assert len(samples.queries) == len(samples.query_positions) == count
        assert samples.moments.queries == count * samples.layer.group
        assert samples.moments.tokens == 31


def test_hidden_queries_leave_keys_and_values() -> None:
    from tests.zoo import tiny

    for samples in record(tiny("gemma2"), [[1, 2, 3, 4, 5, 6, 7] * 5]):
        assert len(samples.keys) == samples.moments.tokens == 31
        assert len(samples.queries) == samples.moments.queries == 0
