from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.layers import Rotary
from kvcompress.stages.bands import band_of_tokens, bands_between, mean_rotations


@given(st.integers(1, 90), st.integers(0, 700), st.integers(1, 300), st.floats(1.05, 3.0))
def test_every_token_is_in_the_band_of_its_distance(
    first: int, nearest: int, tokens: int, growth: float
) -> None:
    positions = range(17, 17 + tokens)
    place = positions.stop - 1 + nearest
    bands = bands_between(first, growth, nearest, nearest + tokens)
    got = np.array(band_of_tokens(bands, place, positions))
    assert got.shape == (tokens,)
    for position, band in zip(positions, got, strict=True):
        start, stop = bands[band]
        assert start <= place - position < stop


def test_the_rotation_of_a_band_is_the_mean_over_its_distances() -> None:
    rotary = Rotary(8, base=100.0)
    bands = bands_between(4, 2.0, 0, 20)
    real, imaginary = mean_rotations(rotary, bands)
    assert real.shape == (len(bands), 4)
    for place, (start, stop) in enumerate(bands):
        mean = np.exp(1j * np.arange(start, stop)[:, None] * rotary.angles).mean(axis=0)
        np.testing.assert_allclose(real[place], mean.real, atol=1e-6)
        np.testing.assert_allclose(imaginary[place], mean.imag, atol=1e-6)
    assert mx.array_equal(real, mean_rotations(rotary, bands)[0])
