from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.fit.lloyd_max import lloyd_max
from kvcompress.stages.book import Book
from kvcompress.stages.levels import tree_book

WIDTHS = [(b,) for b in range(1, 9)] + [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (4, 4)]


def make(widths: tuple[int, ...], dim: int = 64) -> Book:
    if len(widths) == 2:
        low, high = widths
        return tree_book(dim, high, low)
    return Book(lloyd_max(dim, widths[0]), widths)


@pytest.mark.parametrize("widths", WIDTHS)
def test_encode_counts_the_thresholds_below(widths: tuple[int, ...]) -> None:
    book = make(widths)
    edges = book.levels.thresholds.astype(np.float32)
    far = np.array([-1e30, -100, 100, 1e30], np.float32)
    spread = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    near = np.concatenate([np.nextafter(edges, -9), edges, np.nextafter(edges, 9)])
    u = np.concatenate([far, spread, near]).astype(np.float32)
    # side="left": an entry on a threshold goes to the lower level
    np.testing.assert_array_equal(np.array(book.encode(mx.array(u))), np.searchsorted(edges, u))


@given(st.sampled_from(WIDTHS), st.sampled_from([8, 63, 64, 80, 96, 128]), st.integers(0, 99))
def test_planes_are_read_as_they_were_written(
    widths: tuple[int, ...], count: int, seed: int
) -> None:
    book = make(widths)
    codes = np.random.default_rng(seed).integers(0, 2 ** sum(widths), (2, 3, count))
    planes = book.write(mx.array(codes.astype(np.uint8)))
    assert len(planes) == len(widths)
    expected = book.levels.levels.astype(np.float32)[codes]
    np.testing.assert_array_equal(np.array(book.read(planes, count)), expected)
    np.testing.assert_array_equal(np.array(book.decode(mx.array(codes))), expected)


def test_memory_does_not_grow_with_the_number_of_levels() -> None:
    book, u = make((8,)), mx.random.normal((1, 4, 4096, 64))
    mx.eval(u)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(book.encode(u))
    assert mx.get_peak_memory() - before < 6 * u.nbytes
