from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.calibrate.recorder import LayerRecorder, RecordingCache
from kvcompress.calibrate.samples import LayerSamples
from kvcompress.errors import UnsupportedModel
from kvcompress.layers import LayerSpec, Rotary

LAYER = LayerSpec(
    kv_heads=2, query_heads=6, head_dim=8, value_dim=4, dtype="float32", rotary=Rotary(8)
)
LENGTH = 30
CHOSEN = np.array([4, 5, 11, 29])
CHOSEN_QUERIES = np.array([7, 28])


def chunk(seed: int, layer: LayerSpec = LAYER) -> tuple[mx.array, mx.array, mx.array]:
    """Rotated queries and keys, and values, of one window."""
    keys = mx.random.split(mx.random.key(seed), 3)
    q = mx.random.normal((1, layer.query_heads, LENGTH, layer.head_dim), key=keys[0])
    k = mx.random.normal((1, layer.kv_heads, LENGTH, layer.head_dim), key=keys[1]) + 3
    v = mx.random.normal((1, layer.kv_heads, LENGTH, layer.value_dim), key=keys[2])
    return q.astype(layer.mx_dtype), k.astype(layer.mx_dtype), v.astype(layer.mx_dtype)


def record(
    windows: int = 2, cuts: tuple[int, ...] = (), layer: LayerSpec = LAYER, skip: int = 4
) -> LayerSamples:
    recorder = LayerRecorder(layer, skip)
    for window in range(windows):
        q, k, v = chunk(window, layer)
        for start, stop in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            part = slice(start, stop)
            recorder.add_tokens(k[:, :, part], v[:, :, part], start, CHOSEN)
            recorder.add_queries(q[:, :, part], start, CHOSEN_QUERIES)
    return recorder.finish()


def unrotated(x: mx.array, rotary: Rotary) -> np.ndarray:
    """``(1, H, T, D)`` turned back by complex numbers, float64."""
    half = rotary.dims // 2
    wide = np.array(x, np.float64)[0]
    turns = np.exp(-1j * np.arange(x.shape[2])[:, None] * rotary.angles)
    pairs = (wide[..., :half] + 1j * wide[..., half:]) * turns
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def test_moments_equal_one_shot_numpy_over_all_tokens() -> None:
    moments = record(windows=2).moments
    chunks = [chunk(window) for window in range(2)]
    post = np.concatenate([np.array(k, np.float64)[0, :, 4:] for _, k, _ in chunks], axis=1)
    pre = np.concatenate([unrotated(k, Rotary(8))[:, 4:] for _, k, _ in chunks], axis=1)
    values = np.concatenate([np.array(v, np.float64)[0, :, 4:] for _, _, v in chunks], axis=1)
    for name, rows in (("key", pre), ("post_key", post), ("value", values)):
        close = {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(getattr(moments, f"{name}_mean"), rows.mean(axis=1), **close)
        np.testing.assert_allclose(getattr(moments, f"{name}_variance"), rows.var(axis=1), **close)
        np.testing.assert_allclose(getattr(moments, f"{name}_max"), abs(rows).max(axis=1), **close)
    assert moments.tokens == 2 * (LENGTH - 4)


def test_query_moments_are_over_every_head_of_the_group() -> None:
    moments = record(windows=2).moments
    assert moments.queries == 2 * (LENGTH - 4) * LAYER.group
    for name, turn in (("query_moment", True), ("post_query_moment", False)):
        expected = np.zeros((2, 8, 8))
        for window in range(2):
            q = chunk(window)[0]
            rows = unrotated(q, Rotary(8)) if turn else np.array(q, np.float64)[0]
            for head in range(LAYER.query_heads):  # head h reads KV head h // G
                expected[head // LAYER.group] += rows[head, 4:].T @ rows[head, 4:]
        np.testing.assert_allclose(
            getattr(moments, name), expected / moments.queries, rtol=1e-5, atol=1e-5
        )


def test_samples_are_the_chosen_rows() -> None:
    samples = record(windows=2)
    np.testing.assert_array_equal(samples.positions, np.tile(CHOSEN, 2))
    np.testing.assert_array_equal(samples.query_positions, np.tile(CHOSEN_QUERIES, 2))
    for window in range(2):
        q, k, v = chunk(window)
        rows = slice(4 * window, 4 * window + 4)
        keys = unrotated(k, Rotary(8))[:, CHOSEN].swapaxes(0, 1)
        np.testing.assert_allclose(samples.keys[rows], keys, atol=1e-5)
        values = np.array(v)[0][:, CHOSEN].swapaxes(0, 1)
        np.testing.assert_array_equal(samples.values[rows], values)
        queries = unrotated(q, Rotary(8)).reshape(2, 3, LENGTH, 8)[:, :, CHOSEN_QUERIES]
        np.testing.assert_allclose(
            samples.queries[2 * window : 2 * window + 2], queries.transpose(2, 0, 1, 3), atol=1e-5
        )


def test_rotating_the_samples_gives_what_the_cache_saw() -> None:
    samples = record(windows=1)
    q, k, _ = chunk(0)
    seen = np.array(k)[0][:, CHOSEN].swapaxes(0, 1)
    np.testing.assert_allclose(samples.post_keys(), seen, atol=1e-5)
    queries = np.array(q)[0].reshape(2, 3, LENGTH, 8)[:, :, CHOSEN_QUERIES].transpose(2, 0, 1, 3)
    np.testing.assert_allclose(samples.post_queries(), queries, atol=1e-5)
    moved = samples.post_keys([p + 1000 for p in samples.positions])
    assert np.abs(moved - seen).max() > 0.5
    np.testing.assert_allclose(
        np.linalg.norm(moved, axis=-1), np.linalg.norm(seen, axis=-1), rtol=1e-4
    )


@given(st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=5).map(sorted))
def test_chunks_do_not_matter(cuts: list[int]) -> None:
    whole, cut = record(windows=2), record(windows=2, cuts=tuple(cuts))
    for name in ("keys", "values", "queries"):
        np.testing.assert_allclose(getattr(cut, name), getattr(whole, name), atol=1e-5)
    for name in ("positions", "query_positions"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name))
    for name in ("key_mean", "post_key_variance", "value_max", "query_moment"):
        np.testing.assert_allclose(
            getattr(cut.moments, name), getattr(whole.moments, name), rtol=1e-5, atol=1e-5
        )
    assert cut.moments.tokens == whole.moments.tokens
    assert cut.moments.queries == whole.moments.queries


def test_an_unknown_rotation_is_left_as_it_is() -> None:
    layer = LayerSpec(
        kv_heads=2, query_heads=6, head_dim=8, value_dim=4, dtype="float32", rotary_known=False
    )
    samples = record(windows=1, layer=layer)
    seen = np.array(chunk(0, layer)[1])[0][:, CHOSEN].swapaxes(0, 1)
    np.testing.assert_array_equal(samples.keys, seen)
    np.testing.assert_array_equal(samples.post_keys(), seen)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_recorded_as_it_came(dtype: str) -> None:
    layer = LayerSpec(kv_heads=2, query_heads=6, head_dim=8, value_dim=4, dtype=dtype)
    samples = record(windows=1, layer=layer)
    seen = np.array(chunk(0, layer)[2].astype(mx.float32))[0][:, CHOSEN].swapaxes(0, 1)
    np.testing.assert_array_equal(samples.values, seen)
    assert samples.values.dtype == np.float32


def test_hidden_queries_give_the_identity() -> None:
    recorder = LayerRecorder(LAYER)
    recorder.add_tokens(*chunk(0)[1:], 0, CHOSEN)
    samples = recorder.finish()
    assert samples.queries.shape == (0, 2, 3, 8)
    assert samples.post_queries().shape == (0, 2, 3, 8)
    assert samples.moments.queries == 0
    np.testing.assert_array_equal(samples.moments.query_moment, np.stack([np.eye(8)] * 2))


def test_numbers_that_are_not_finite_are_told() -> None:
    recorder = LayerRecorder(LAYER)
    _, k, v = chunk(0)
    recorder.add_tokens(k * mx.where(mx.arange(8) == 3, mx.inf, 1.0), v, 0, CHOSEN)
    with pytest.raises(UnsupportedModel, match="layer 0: key_variance is not finite"):
        recorder.finish()


def test_what_is_held_does_not_grow_with_the_text() -> None:
    recorder = LayerRecorder(LAYER)

    def held() -> int:
        kept = sum(a.nbytes for part in recorder._sampled.values() for a in part)
        owners = [a.base for part in recorder._sampled.values() for a in part if a.base is not None]
        return kept + sum(owner.nbytes for owner in owners)

    _, k, v = chunk(0)
    recorder.add_tokens(k, v, 0, CHOSEN)
    before = held()
    for _ in range(20):
        recorder.add_tokens(k, v, 0, CHOSEN[:0])
    assert held() == before


def test_split_keeps_the_last_tokens_apart() -> None:
    samples = record(windows=2)
    fitted, held = samples.split(3)
    np.testing.assert_array_equal(np.concatenate([fitted.keys, held.keys]), samples.keys)
    np.testing.assert_array_equal(held.positions, samples.positions[-3:])
    assert len(held.values) == 3
    assert held.queries is samples.queries
    assert held.moments is samples.moments
    whole, none = samples.split(0)
    assert (len(whole.keys), len(none.keys)) == (8, 0)


def test_thinned_tokens_are_spread_evenly() -> None:
    samples = record(windows=2)
    thin = samples.thinned(3)
    np.testing.assert_array_equal(thin.keys, samples.keys[[0, 2, 5]])
    np.testing.assert_array_equal(thin.values, samples.values[[0, 2, 5]])
    np.testing.assert_array_equal(thin.positions, samples.positions[[0, 2, 5]])
    assert samples.thinned(8) is samples


def test_a_recording_cache_answers_as_the_plain_one() -> None:
    from mlx_lm.models.cache import KVCache

    plain, shown = KVCache(), KVCache()
    cache = RecordingCache(shown, LayerRecorder(LAYER), CHOSEN, CHOSEN_QUERIES)
    assert cache.empty()
    q, k, v = chunk(0)
    for part in (slice(0, 17), slice(17, 18), slice(18, LENGTH)):
        length = part.stop - part.start
        assert cache.make_mask(length, return_array=False, window_size=None) == plain.make_mask(
            length, return_array=False, window_size=None
        )
        mask = "causal" if length > 1 else None
        keys, values = plain.update_and_fetch(k[:, :, part], v[:, :, part])
        seen, seen_values = cache.update_and_fetch(k[:, :, part], v[:, :, part])
        assert mx.array_equal(seen, keys)
        assert mx.array_equal(seen_values, values)
        out = mx.fast.scaled_dot_product_attention(
            q[:, :, part], keys, values, scale=0.3, mask=mask
        )
        attended = seen.step.attend(q[:, :, part], scale=0.3, mask=mask)
        assert mx.array_equal(attended, out)
        again, _ = cache.keys_and_values()
        assert mx.array_equal(again, keys)
        assert again.part == "key"
    assert (cache.offset, cache.size(), cache.nbytes) == (plain.offset, LENGTH, plain.nbytes)
    assert cache.trim(3) == 3
    assert shown.offset == LENGTH - 3
