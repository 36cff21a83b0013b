from __future__ import annotations

import attrs
import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList

from kvcompress.cache.accounting import predict_bytes, report
from kvcompress.cache.batch import CompressedBatchCache
from kvcompress.cache.walk import reachable_arrays
from tests.stand_ins import LAYER, cache, tokens


@given(
    chunks=st.lists(st.sampled_from([1, 3, 30, 200, 700]), min_size=1, max_size=6),
    window=st.sampled_from([0, 16, 64]),
    forget=st.integers(0, 40),
    warmup=st.sampled_from([0, 12]),
)
def test_stored_bytes_are_the_predicted_ones(
    chunks: list[int], window: int, forget: int, warmup: int
) -> None:
    held = cache(window=window, warmup=warmup)
    for i, count in enumerate(chunks):
        _, k, v = tokens(count, seed=i)
        held.update_and_fetch(k, v)
    held.trim(forget)
    numbers = report([held])
    assert numbers.stored_bytes == numbers.predicted_bytes
    assert numbers.resident_bytes == held.nbytes
    assert numbers.tokens_seen == held.offset


def test_a_walk_finds_what_nbytes_says() -> None:
    held = cache()
    for seed in range(5):
        _, k, v = tokens(700, seed=seed)
        held.update_and_fetch(k, v)
    mx.eval(list(held._arrays()))
    found = sum(a.nbytes for a in reachable_arrays([held.__dict__]))
    assert held.nbytes <= found <= 1.03 * held.nbytes


def test_numbers_of_the_report() -> None:
    held = cache()
    _, k, v = tokens(4 + 16 + 80)
    held.update_and_fetch(k, v)
    numbers = report([held, object.__new__(_Plain)])
    assert numbers.tokens_exact == 20
    assert numbers.fp16_key_bytes == 80 * 2 * 32 * 2
    assert numbers.fp16_value_bytes == 80 * 2 * 16 * 2
    assert numbers.compressed_key_bytes == 80 * 2 * 32 * 4
    assert numbers.compression_ratio == 0.5
    assert numbers.assigned_avg_bits == 32
    assert numbers.bits_per_value == 8 * numbers.resident_bytes / (100 * 2 * 48)
    assert (numbers.plain_layers, numbers.plain_bytes) == (1, 77)
    assert len(numbers.layers) == 1


def test_bundled_caches_are_counted_as_the_single_ones_they_are() -> None:
    held, state = cache(), ArraysCache(1)
    _, k, v = tokens(100)
    held.update_and_fetch(k, v)
    state[0] = mx.zeros((1, 5), mx.float32)
    assert report([CacheList(state, held)]) == report([state, held])
    assert report([CacheList(state, held)]).plain_bytes == 20


def test_a_batch_is_counted_as_its_rows_are() -> None:
    rows = []
    for count in (100, 60, 7):
        row = cache()
        _, k, v = tokens(count)
        row.update_and_fetch(k, v)
        rows.append(row)
    numbers, alone = report([CompressedBatchCache(rows)]), report(rows)
    assert (numbers.plain_layers, numbers.plain_bytes, len(numbers.layers)) == (0, 0, 1)
    assert attrs.evolve(numbers, layers=(), tokens_exact=0) == attrs.evolve(
        alone, layers=(), tokens_exact=0
    )
    assert (numbers.tokens_seen, numbers.tokens_exact) == (100, 100 - rows[0].tokens_coded)
    batch = CompressedBatchCache(rows)
    batch.filter([])
    assert report([batch]).resident_bytes == 0


class _Plain:
    nbytes = 77


def test_an_empty_report_divides_by_nothing() -> None:
    numbers = report([cache()])
    assert (numbers.bits_per_value, numbers.times_smaller, numbers.compression_ratio) == (0, 1, 1)


def test_prediction_counts_the_exact_and_the_coded() -> None:
    schema = cache(warmup=8).codec.schema
    row = 2 * (32 + 16) * 4
    assert predict_bytes(LAYER, schema, 0, 10) == 10 * row
    assert predict_bytes(LAYER, schema, 7, 10, batch=2) == 2 * (17 * row + row)
