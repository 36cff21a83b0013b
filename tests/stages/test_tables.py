from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.stages import tables
from kvcompress.stages.tables import chunked, gather, nearest, table_scores, tables_pay
from tests.stages.vq_cases import MAKE, commuting, normal, product, rows


@given(st.integers(1, 300), st.integers(0, 99))
def test_nearest_is_the_first_of_the_least(entries: int, seed: int) -> None:
    # Whole numbers, so that there are ties.
    distances = np.random.default_rng(seed).integers(0, 20, (3, 5, entries)).astype(np.float32)
    got = nearest(mx.array(distances))
    assert got.dtype == (mx.uint8 if entries <= 256 else mx.uint16)
    np.testing.assert_array_equal(np.array(got), distances.argmin(-1))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 16), (1, 3, 4, 5, 16), (1, 1, 1, 1, 16)])
@pytest.mark.parametrize("dtype", [mx.uint8, mx.uint16])
def test_gather_looks_up_along_the_tokens(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    table = normal(*shape)
    codes = np.random.default_rng(0).integers(0, 16, (2, 3, 7, 4))
    got = gather(mx.array(table), mx.array(codes).astype(dtype))
    whole = np.broadcast_to(table, (2, 3, 4, shape[3], 16))
    expected = np.take_along_axis(whole, codes.swapaxes(2, 3)[:, :, :, None], axis=-1)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("kind", sorted(MAKE))
def test_scores_are_sums_of_look_ups(
    kind: str, bands: int, queries: int, cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "on_cpu", lambda: cpu)
    vq = MAKE[kind](12, 5)
    codes = vq.encode(rows(12, 30, 1, 2))
    q = mx.stack([rows(12, queries, 2 + band, 2) for band in range(bands)], axis=2)
    band = (mx.arange(30) // 10 % bands).astype(mx.uint32)
    got = table_scores(vq, q, codes, band if bands > 1 else None)
    every = q @ vq.decode(codes).swapaxes(-1, -2)[:, :, None]
    expected = mx.take_along_axis(every, band.reshape(1, 1, 1, 1, -1), axis=2).squeeze(2)
    assert got.shape == expected.shape == (2, 2, queries, 30)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_tables_of_many_bands_side_by_side_are_addressed_whole() -> None:
    vq, bands = product(8, 12, 4), 20  # 81,920 entries
    codes = vq.encode(rows(8, 40, 1))
    q = mx.stack([rows(8, 2, band) for band in range(bands)], axis=2)
    band = (mx.arange(40) // 2).astype(mx.uint32)
    own = mx.take(q, band, axis=2).swapaxes(2, 3)  # (B, H, M, T, D)
    expected = (own * vq.decode(codes)[:, :, None]).sum(axis=-1)
    np.testing.assert_allclose(table_scores(vq, q, codes, band), expected, atol=1e-4)


@given(st.integers(0, 300), st.integers(1, 50))
def test_groups_are_of_one_size_and_see_each_token_once(count: int, distances: int) -> None:
    seen: list[tuple[int, ...]] = []

    def double(groups: mx.array) -> mx.array:
        seen.append(groups.shape)
        return groups * 2

    x = mx.array(normal(2, 3, count, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_CHUNK_BYTES", 400)
        patch.setattr(tables, "_GPU_CHUNK_BYTES", 400)
        got = chunked(double, x, distances)
    assert mx.array_equal(got, x * 2)
    if count:
        (size,) = {shape[3] for shape in seen}
        assert size in (2, 4, 8, 16, 32)
        assert all(shape[2] * size <= max(2, 100 // distances) for shape in seen)
        assert 0 <= sum(shape[2] for shape in seen) * size - count < size


def test_tables_pay_for_few_rows_over_many_tokens() -> None:
    vq = product(64, 8, 8, heads=3)
    assert tables_pay(vq, rows=3, tokens=4096)
    assert not tables_pay(vq, rows=512, tokens=4096)
    assert not tables_pay(vq, rows=3, tokens=16)
    assert not tables_pay(product(128, 12, 8), rows=3, tokens=1024)
    # Codes of few channels each are as many look-ups as their channels in pairs.
    assert not tables_pay(product(128, 8, 4), rows=4, tokens=4096)
    # A decoded key of many stages is a long sum, which tables cut short.
    assert tables_pay(commuting(64, 6, stages=5), rows=32, tokens=1024)
    assert not tables_pay(vq, rows=32, tokens=1024)
    # Of bands one after the other each has its launches, and of tables each is built.
    assert tables_pay(vq, rows=3, tokens=1024, bands=16)
    assert tables_pay(product(64, 8, 4), rows=3, tokens=1024, heads=3, bands=4)
    assert not tables_pay(product(64, 8, 4), rows=3, tokens=1024, heads=300, bands=4)
    assert not tables_pay(product(64, 12, 8, heads=3), rows=3, tokens=1024, bands=16)
