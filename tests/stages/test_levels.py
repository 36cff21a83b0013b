from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.stages.base import Quantiser
from kvcompress.stages.levels import LloydMaxLevels, UniformLevels, scalar_levels

KINDS = ("lloyd-max", "uniform")


def table(quantiser: Quantiser) -> np.ndarray:
    every = mx.arange(1 << quantiser.bits).astype(mx.uint8)
    return np.array(quantiser.decode(every))


@given(st.sampled_from(KINDS), st.integers(1, 8), st.sampled_from([1, 2, 3, 64, 96]), st.data())
def test_the_law_of_quantisers(kind: str, bits: int, dim: int, data: st.DataObject) -> None:
    quantiser = scalar_levels(dim, bits, kind)  # type: ignore[arg-type]
    assert isinstance(quantiser, Quantiser)
    assert (quantiser.dim, quantiser.bits, quantiser.codes) == (dim, bits, dim)
    seed = data.draw(st.integers(0, 999))
    u = mx.random.normal((1, 2, 7, dim), key=mx.random.key(seed)) * 1.3
    codes = quantiser.encode(u)
    assert codes.dtype == mx.uint8
    got = np.array(quantiser.decode(codes))
    levels = table(quantiser)
    best = np.abs(np.array(u)[..., None] - levels).min(-1)
    np.testing.assert_allclose(np.abs(np.array(u) - got), best, atol=2e-6)
    assert mx.array_equal(quantiser.encode(quantiser.decode(codes)), codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_data_in_the_codebook_has_no_error(kind: str, bits: int) -> None:
    quantiser = scalar_levels(64, bits, kind)  # type: ignore[arg-type]
    levels = mx.array(table(quantiser))
    np.testing.assert_array_equal(np.array(quantiser.encode(levels)), np.arange(1 << bits))
    np.testing.assert_allclose(quantiser.decode(quantiser.encode(levels)), levels, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_tie_goes_to_the_lower_level(kind: str, bits: int) -> None:
    # Zero is a threshold of every symmetric codebook with an even number of levels.
    got = scalar_levels(64, bits, kind).encode(mx.zeros((3,)))  # type: ignore[arg-type]
    assert got.tolist() == [(1 << bits) // 2 - 1] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_far_entries_take_the_outer_levels(kind: str) -> None:
    quantiser = scalar_levels(64, 8, kind)  # type: ignore[arg-type]
    assert quantiser.encode(mx.array([-1e30, -50.0, 50.0, 1e30])).tolist() == [0, 0, 255, 255]


def test_tables_are_shared_and_their_bytes_counted() -> None:
    assert LloydMaxLevels(64, 4).book is LloydMaxLevels(64, 4).book
    assert LloydMaxLevels(64, 4) == LloydMaxLevels(64, 4)
    assert LloydMaxLevels(64, 4) != LloydMaxLevels(64, 3)
    assert UniformLevels(64, 4).table_bytes == 0
    assert LloydMaxLevels(64, 4).table_bytes == 16 * 4 + 256 * 2 * 4
    copied = copy.deepcopy(LloydMaxLevels(64, 4))
    assert (
        copied.encode(mx.array([0.3])).item()
        == LloydMaxLevels(64, 4).encode(mx.array([0.3])).item()
    )


def test_unknown_kinds_and_illegal_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="kind must be 'lloyd-max' or 'uniform'"):
        scalar_levels(64, 4, "best")  # type: ignore[arg-type]
    for kind in KINDS:
        for bits in (0, 9):
            with pytest.raises(ConfigError, match=rf"bits must be from 1 to 8 \(got {bits}\)"):
                scalar_levels(64, bits, kind)  # type: ignore[arg-type]
