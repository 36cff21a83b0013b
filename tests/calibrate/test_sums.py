from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.calibrate.sums import ChannelSums, SecondMoment


def stream(seed: int, cuts: list[int], offset: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """``(2, T, 5)`` float32 vectors far from zero, whole and cut up."""
    x = np.random.default_rng(seed).normal(offset, 1.0, (2, 60, 5)).astype(np.float32)
    return x, np.split(x, sorted(cuts), axis=1)


@given(st.integers(0, 99), st.lists(st.integers(0, 60), max_size=8), st.sampled_from([0.0, 900.0]))
def test_sums_equal_one_shot_numpy_however_cut(seed: int, cuts: list[int], offset: float) -> None:
    x, pieces = stream(seed, cuts, offset)
    sums, second = ChannelSums((2, 5)), SecondMoment((2, 5))
    for piece in pieces:
        sums.add(piece)
        second.add(piece)
    wide = x.astype(np.float64)
    assert sums.count == second.count == 60
    np.testing.assert_allclose(sums.mean, wide.mean(axis=1), rtol=1e-6)
    # float32 sums would lose the variance next to a mean of 900 altogether.
    np.testing.assert_allclose(sums.variance, wide.var(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(sums.largest, np.abs(x).max(axis=1))
    expected = np.einsum("htd,hte->hde", wide, wide) / 60
    np.testing.assert_allclose(second.moment, expected, rtol=1e-6, atol=1e-6)


def test_the_second_moment_is_symmetric_and_at_first_the_identity() -> None:
    second = SecondMoment((2, 5))
    np.testing.assert_array_equal(second.moment, np.stack([np.eye(5)] * 2))
    second.add(stream(1, [], 3.0)[0])
    np.testing.assert_array_equal(second.moment, second.moment.swapaxes(1, 2))


@pytest.mark.parametrize("name", ["mean", "variance", "largest"])
def test_nothing_seen_gives_zeros(name: str) -> None:
    np.testing.assert_array_equal(getattr(ChannelSums((2, 5)), name), np.zeros((2, 5)))
