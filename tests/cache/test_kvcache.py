from __future__ import annotations

import copy
import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.cache.drafts import LONGEST
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.errors import CacheFileError, ConfigError
from tests.stand_ins import LAYER, StandIn, cache, largest, tokens

SCALE = 0.17
CHUNKS = st.lists(st.sampled_from([1, 1, 2, 5, 17, 40]), min_size=1, max_size=12)
WINDOWS = st.sampled_from([-1, 0, 5, 16, 1000])


def feed(held: CompressedKVCache, k: mx.array, v: mx.array, chunks: list[int]) -> Any:
    start, views = held.offset, None
    for count in chunks:
        views = held.update_and_fetch(
            k[:, :, start : start + count], v[:, :, start : start + count]
        )
        start += count
    return views


@given(chunks=CHUNKS, window=WINDOWS, warmup=st.sampled_from([0, 12]))
def test_every_chunking_holds_the_same_and_nearly_what_came(
    chunks: list[int], window: int, warmup: int
) -> None:
    _, k, v = tokens(sum(chunks))
    one, many = (cache(window=window, warmup=warmup) for _ in range(2))
    feed(one, k, v, [sum(chunks)])
    feed(many, k, v, chunks)
    assert one.offset == many.offset == sum(chunks)
    assert one.tokens_coded == many.tokens_coded == one.coded_at(sum(chunks))
    for a, b, given_rows in zip(one.keys_and_values(), many.keys_and_values(), (k, v), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))
        assert largest(a - given_rows) < 1e-4


@given(chunks=CHUNKS, window=WINDOWS)
def test_attention_of_each_step_is_that_of_its_dense_view(chunks: list[int], window: int) -> None:
    q, k, v = tokens(sum(chunks))
    held, start = cache(window=window, steps=4.0), 0
    for count in chunks:
        part = slice(start, start + count)
        keys, values = held.update_and_fetch(k[:, :, part], v[:, :, part])
        mask = "causal" if count > 1 else None
        out = keys.step.attend(q[:, :, part], scale=SCALE, mask=mask)
        expected = mx.fast.scaled_dot_product_attention(
            q[:, :, part], keys, values, scale=SCALE, mask=mask
        )
        cut = held.coded_at(start + count - 1) > held.coded_at(start)
        if count > LONGEST or not cut:
            assert largest(out - expected) < 1e-4  # else it is read as if token by token
        start += count


def test_a_step_reads_exact_rows_for_what_was_exact_when_its_chunk_came() -> None:
    _, k, v = tokens(120)
    held = cache(window=16, steps=2.0)
    held.update_and_fetch(k[:, :, :40], v[:, :, :40])
    coded = held.tokens_coded
    keys, _ = held.update_and_fetch(k[:, :, 40:], v[:, :, 40:])
    assert 0 < coded < held.tokens_coded
    wrong = np.abs(np.array(keys - k)).max(axis=(0, 1, 3)) > 1e-6
    assert np.flatnonzero(wrong).tolist() == list(range(4, 4 + coded))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_window_over_everything_is_the_plain_cache_bit_for_bit(dtype: str) -> None:
    from attrs import evolve
    from mlx_lm.models.cache import KVCache

    layer = evolve(LAYER, dtype=dtype, value_dim=32)
    q, k, v = tokens(60, layer)
    q = q.astype(layer.mx_dtype)
    ours, plain, start = cache(layer, window=60), KVCache(), 0
    for count in (20, 1, 30, 1, 1, 7):
        part = slice(start, start + count)
        mask = ours.make_mask(count)
        keys, values = ours.update_and_fetch(k[:, :, part], v[:, :, part])
        out = keys.step.attend(q[:, :, part], scale=SCALE, mask=mask)
        plain_keys, plain_values = plain.update_and_fetch(k[:, :, part], v[:, :, part])
        expected = mx.fast.scaled_dot_product_attention(
            q[:, :, part], plain_keys, plain_values, scale=SCALE, mask=mask
        )
        assert mx.array_equal(keys, plain_keys)
        assert mx.array_equal(values, plain_values)
        assert mx.array_equal(out, expected)
        start += count


@given(chunks=CHUNKS, window=WINDOWS, forget=st.integers(0, 200), more=CHUNKS)
def test_trim_is_as_if_the_tokens_were_never_seen(
    chunks: list[int], window: int, forget: int, more: list[int]
) -> None:
    seen = sum(chunks)
    left = max(0, seen - forget)
    _, k, v = tokens(seen + sum(more))
    held = cache(window=window)
    feed(held, k, v, chunks)
    assert held.trim(forget) == min(forget, seen)
    assert held.offset == left
    assert held.empty() == (left == 0)
    if left:
        for rows, came in zip(held.keys_and_values(), (k, v), strict=True):
            assert largest(rows - came[:, :, :left]) < 1e-4
    new_k, new_v = (mx.concatenate([a[:, :, :left], a[:, :, seen:]], axis=2) for a in (k, v))
    feed(held, new_k, new_v, more)
    fresh = cache(window=window)
    feed(fresh, new_k, new_v, [left + sum(more)])
    for a, b in zip(held.keys_and_values(), fresh.keys_and_values(), strict=True):
        assert largest(a - b) < 1e-4
    assert held.tokens_coded >= fresh.tokens_coded


def test_trim_takes_integers_of_every_type_and_nothing_else() -> None:
    _, k, v = tokens(100)
    held = cache(window=16)
    feed(held, k, v, [80])
    assert held.trim(np.int64(3)) == 3
    for bad in (2.0, None, "2", -1):
        with pytest.raises(ConfigError, match="tokens to trim must be an integer"):
            held.trim(bad)  # type: ignore[arg-type]
    feed(held, k, v, [20])
    assert type(held.offset) is int
    assert held.offset == 97
    held.state = held.state


def test_trim_forgets_the_mean_only_with_the_last_code() -> None:
    _, k, v = tokens(200)
    held = cache(warmup=12)
    feed(held, k, v, [100])
    held.trim(90)
    assert held.tokens_coded == 6
    assert held.constants
    held.trim(7)
    assert held.tokens_coded == 0
    assert not held.constants


@given(chunks=CHUNKS, window=WINDOWS, warmup=st.sampled_from([0, 12]))
def test_state_and_copies_go_on_as_the_original(
    chunks: list[int], window: int, warmup: int
) -> None:
    seen = sum(chunks)
    _, k, v = tokens(seen + 30)
    held = cache(window=window, warmup=warmup)
    feed(held, k, v, chunks)
    before = [np.array(a) for a in held.keys_and_values()]
    others = [type(held).from_state(held.state), copy.deepcopy(held)]
    for other in others:
        assert (other.offset, other.tokens_coded) == (held.offset, held.tokens_coded)
        feed(other, k, v, [10, 20])
    for a, b in zip(before, held.keys_and_values(), strict=True):
        np.testing.assert_array_equal(a, np.array(b))
    feed(held, k, v, [30])
    for other in others:
        for a, b in zip(held.keys_and_values(), other.keys_and_values(), strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


def test_a_copy_shares_tables_and_costs_nothing_until_it_is_written() -> None:
    _, k, v = tokens(512)
    held = cache()
    feed(held, k, v, [512])
    mx.eval(list(held._arrays()))
    before = mx.get_active_memory()
    other = copy.deepcopy(held)
    mx.eval(list(other._arrays()))
    assert other.codec is held.codec
    assert mx.get_active_memory() - before < 0.05 * held.nbytes


def test_state_holds_only_what_mlx_lm_can_save() -> None:
    _, k, v = tokens(100)
    held = cache(warmup=8)
    feed(held, k, v, [100])
    assert all(isinstance(item, (mx.array, str)) for item in held.state)
    held.state = held.state
    assert held.offset == 100


def test_state_of_another_configuration_is_refused() -> None:
    _, k, v = tokens(100)
    held = cache()
    feed(held, k, v, [100])
    from attrs import evolve

    other = cache(evolve(LAYER, index=3))
    with pytest.raises(CacheFileError, match="differs in layer"):
        other.state = held.state
    with pytest.raises(CacheFileError, match="not one of a kvcompress cache"):
        CompressedKVCache.from_state(("nonsense",))


@pytest.mark.parametrize(
    ("shape", "text"),
    [((1, 3, 4, 32), r"keys must have shape \(B, 2, L, 32\)"), ((1, 2, 4, 31), "31")],
)
def test_a_chunk_that_does_not_fit_is_refused(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        cache().update_and_fetch(mx.zeros(shape), mx.zeros((1, 2, 4, 16)))


def test_other_refusals_name_what_is_wrong() -> None:
    held = cache()
    k, v = mx.zeros((1, 2, 4, 32)), mx.zeros((1, 2, 4, 16))
    with pytest.raises(ConfigError, match="must be float32"):
        held.update_and_fetch(k.astype(mx.float16), v.astype(mx.float16))
    with pytest.raises(ConfigError, match="same tokens"):
        held.update_and_fetch(k, v[:, :, :2])
    with pytest.raises(ConfigError, match="is empty"):
        held.keys_and_values()
    held.update_and_fetch(k, v)
    with pytest.raises(ConfigError, match="batch size must stay 1"):
        held.update_and_fetch(mx.concatenate([k, k]), mx.concatenate([v, v]))


def test_rows_of_a_batch_do_not_meet() -> None:
    _, k, v = tokens(90, batch=3)
    together = cache(warmup=8, steps=8.0)
    feed(together, k, v, [50, 40])
    for row in range(3):
        alone = cache(warmup=8, steps=8.0)
        feed(alone, k[row : row + 1], v[row : row + 1], [90])
        for a, b in zip(together.keys_and_values(), alone.keys_and_values(), strict=True):
            np.testing.assert_array_equal(np.array(a[row : row + 1]), np.array(b))


def test_nothing_in_its_names_sends_mlx_lm_astray() -> None:
    held = cache()
    for name in ("bits", "group_size", "to_quantized", "__len__"):
        assert not hasattr(held, name)
    assert bool(held)
    assert held.is_trimmable()


def test_a_cache_made_here_works_in_another_thread() -> None:
    _, k, v = tokens(100)
    mx.eval(k, v)
    held, out = cache(warmup=8), []

    def work() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            out.append(np.array(feed(held, k, v, [60, 1, 1, 38])[0]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert out[0].shape == (1, 2, 100, 32)


def test_layers_that_share_a_cache_read_what_its_own_layer_read() -> None:
    _, k, v = tokens(120)
    method = StandIn(steps=2.0)
    shared = CompressedKVCache(method, LAYER, method.bind(LAYER), shared=True)
    keys, _ = shared.update_and_fetch(k, v)
    again, _ = shared.keys_and_values()
    assert again.step is keys.step
    assert mx.array_equal(again, k)
    _ = shared.state  # the step is over
    assert largest(shared.keys_and_values()[0] - k) > 0.1


@pytest.mark.parametrize("last", [1, 5, 40])
def test_what_is_shared_ends_with_a_trim(last: int) -> None:
    method = StandIn(window=16)
    shared = CompressedKVCache(method, LAYER, method.bind(LAYER), shared=True)
    _, k, v = tokens(60)
    for part in (slice(0, 60 - last), slice(60 - last, 60)):
        shared.update_and_fetch(k[:, :, part], v[:, :, part])
    shared.trim(1)
    assert shared.keys_and_values()[0].shape[2] == shared.offset == 59


def test_prefill_does_not_keep_full_size_rows() -> None:
    held = cache(StandIn().bind(LAYER).layer, window=16)
    for start in range(0, 4000, 500):
        _, k, v = tokens(500, seed=start)
        views = feed_at(held, k, v)
        mx.eval(views)
    del views
    mx.eval(list(held._arrays()))
    exact = sum(a.nbytes for a in held.exact.arrays())
    assert exact <= (4 + 16 + 8) * 2 * (32 + 16) * 4


def feed_at(held: CompressedKVCache, k: mx.array, v: mx.array) -> Any:
    return held.update_and_fetch(k, v)


def test_drafts_leave_no_trace_where_other_layers_read_the_cache() -> None:
    _, k, v = tokens(60)
    method = StandIn(window=16)
    shared, alone = (
        CompressedKVCache(method, LAYER, method.bind(LAYER), shared=each) for each in (True, False)
    )
    for held in (shared, alone):
        held.update_and_fetch(k[:, :, :46], v[:, :, :46])
        held.update_and_fetch(k[:, :, 46:52], v[:, :, 46:52])
    shared.keys_and_values()
    for held in (shared, alone):
        held.trim(6)
    assert shared.tokens_coded == alone.tokens_coded
    assert mx.array_equal(shared.keys_and_values()[0], alone.keys_and_values()[0])


def test_no_sequences_are_refused() -> None:
    none = [mx.zeros((0, *x.shape[1:])) for x in tokens(5)[1:]]
    with pytest.raises(ConfigError, match="at least one sequence"):
        cache().update_and_fetch(*none)


def test_a_truth_value_is_no_number_of_tokens() -> None:
    held = cache()
    feed(held, *tokens(9)[1:], [9])
    with pytest.raises(ConfigError, match=r"an integer from 0 \(got True\)"):
        held.trim(True)
    assert held.offset == 9
