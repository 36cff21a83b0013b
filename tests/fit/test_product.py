from __future__ import annotations

import numpy as np
import pytest

from kvcompress.errors import ConfigError
from kvcompress.fit.kmeans import kmeans
from kvcompress.fit.product import Books, fit_product

H, N, D, S = 2, 60, 12, 4
SHAPES: dict[Books, tuple[int, int]] = {"layer": (1, 1), "head": (H, 1), "sub-space": (H, D // S)}


def rows(count: int = N) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((H, count, D))


def fitted(x: np.ndarray, books: Books, points: int = 10**6, entries: int = 8) -> np.ndarray:
    return fit_product(x, S, entries, books=books, points=points, rounds=5, seed=1).codebook


@pytest.mark.parametrize("books", SHAPES)
def test_a_codebook_is_that_of_what_shares_it(books: Books) -> None:
    x = rows()
    book = fitted(x, books)
    assert book.shape == (*SHAPES[books], 8, S)
    assert book.dtype == np.float16
    for h in range(H):
        for m in range(D // S):
            mine = book[min(h, book.shape[0] - 1), min(m, book.shape[1] - 1)]
            head = x if books == "layer" else x[h : h + 1]
            cut = head.reshape(-1, N, D // S, S).swapaxes(1, 2)
            if books == "sub-space":
                cut = cut[:, m]
            wanted = kmeans(cut.reshape(-1, S), 7, seed=1, rounds=5).centroids
            np.testing.assert_array_equal(mine[1:], wanted.astype(np.float16))
            assert not mine[0].any()


@pytest.mark.parametrize("books", SHAPES)
def test_as_many_entries_as_points_hold_them(books: Books) -> None:
    x = rows(4)
    shared = H * D // S // np.prod(SHAPES[books])
    book = fitted(x, books, entries=int(4 * shared) + 1)
    cut = x.reshape(H, 4, D // S, S).swapaxes(1, 2)[:, :, :, None]
    gaps = np.abs(cut - np.broadcast_to(book, (H, D // S, *book.shape[2:]))[:, :, None]).max(-1)
    assert gaps.min(-1).max() < 2e-3


def test_points_are_spread_over_tokens_heads_and_sub_spaces() -> None:
    # A value that names its head, sub-space and token: what was taken can be read off.
    x = np.arange(H * N * D // S).repeat(S).reshape(H, N, D).astype(np.float64)
    taken = np.sort(fitted(x, "layer", points=36, entries=37)[0, 0, 1:, 0].astype(int))
    heads, places, spaces = taken // (N * D // S), taken // (D // S) % N, taken % (D // S)
    for head in range(H):
        for space in range(D // S):
            own = places[(heads == head) & (spaces == space)]
            assert own.tolist() == list(range(0, N, 10))


def test_rows_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 channels are not divisible by sub_dim 5"):
        fit_product(rows(), 5, 4, books="layer", points=10, rounds=1, seed=0)


def test_the_fit_is_reported() -> None:
    x = rows()
    found = fit_product(x, S, 8, books="head", points=10**6, rounds=5, seed=1)
    cut = x.reshape(H, -1, 1, S)
    gaps = np.square(cut - found.codebook[:, 0, None, 1:].astype(np.float64)).sum(-1).min(-1)
    assert found.left == pytest.approx(gaps.sum() / np.square(x).sum(), rel=1e-3)
    assert found.dead == 0
    few = fit_product(np.zeros((1, 5, 4)), S, 8, books="layer", points=10, rounds=5, seed=1)
    assert (few.left, few.dead) == (0.0, 6)
