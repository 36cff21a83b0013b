from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.stages.centre import fixed_centre, no_centre, rotated, sequence_centre
from tests.stages.rope_cases import DIM, HEADS, ROTATIONS, largest, normal

KINDS = sorted(ROTATIONS)


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 2))
def test_a_sequences_centre_is_the_mean_of_its_first_tokens(
    tokens: int, length: int, batch: int
) -> None:
    x = normal(batch, HEADS, length, DIM) + 3
    centre = sequence_centre(tokens)
    assert centre.active
    assert centre.table_bytes == 0
    got = centre.of(x)
    assert got.shape == (batch, HEADS, 1, DIM)
    assert got.dtype == mx.float32
    expected = np.array(x)[:, :, :tokens].mean(2, keepdims=True)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    later = mx.concatenate([x[:, :, :tokens], x[:, :, tokens:] * 9], axis=2)
    assert mx.array_equal(centre.of(later), got)


def test_the_mean_of_huge_keys_does_not_overflow() -> None:
    assert mx.isfinite(sequence_centre(64).of(mx.full((1, 1, 64, 4), 1e38))).all().item()


def test_kinds_of_centre() -> None:
    assert not no_centre().active
    mean = np.arange(12.0).reshape(2, 6)
    for given_mean in (mean, mean.astype(np.float16), mx.array(mean.astype(np.float32))):
        centre = fixed_centre(given_mean)
        assert centre.active
        assert centre.tokens == 0
        assert centre.mean is not None
        assert centre.mean.dtype == mx.float32
        np.testing.assert_array_equal(centre.mean, mean)
        assert centre.table_bytes == 48
    copied = copy.deepcopy(centre).mean
    assert copied is not None
    np.testing.assert_array_equal(copied, mean)


@given(st.sampled_from(KINDS), st.integers(0, 4000), st.integers(1, 9))
def test_keys_bear_the_mean_as_they_bear_their_position(kind: str, start: int, count: int) -> None:
    rotary, mean = ROTATIONS[kind], normal(1, HEADS, 1, DIM)
    got = rotated(mean, rotary, range(start, start + count))
    if rotary is None:
        assert got is mean
        return
    assert got.shape == (1, HEADS, count, DIM)
    for place in range(count):
        alone = rotary.rotate(mean, range(start + place, start + place + 1))
        np.testing.assert_allclose(got[:, :, place : place + 1], alone, atol=2e-3)
    scattered = rotated(mean, rotary, list(range(start, start + count)))
    np.testing.assert_allclose(scattered, got, atol=1e-5)


@given(
    st.sampled_from([k for k in KINDS if k != "none"]),
    st.integers(0, 131_072) | st.integers(4080, 4110),
    st.integers(2, 40),
    st.data(),
)
def test_a_mean_is_the_same_however_its_tokens_are_cut(
    kind: str, start: int, count: int, data: st.DataObject
) -> None:
    rotary, mean = ROTATIONS[kind], normal(1, HEADS, 1, DIM)
    cut = start + data.draw(st.integers(1, count - 1), "cut")
    whole = rotated(mean, rotary, range(start, start + count))
    parts = [rotated(mean, rotary, p) for p in (range(start, cut), range(cut, start + count))]
    assert mx.array_equal(mx.concatenate(parts, axis=2), whole)
    assert mx.array_equal(rotated(mean, rotary, list(range(start, start + count))), whole)
    # MLX computes angles in float32: at 131,072 an angle is off by up to 8e-3 wherever it is used.
    with_mlx = rotary.rotate(mx.broadcast_to(mean, whole.shape), range(start, start + count))
    assert largest(whole - with_mlx) < 0.03 * largest(mean)


def test_a_mean_of_any_float_type_is_taken_and_one_that_is_not_finite_refused() -> None:
    assert fixed_centre(mx.ones((2, 6), mx.bfloat16)).mean is not None
    row = fixed_centre(np.ones((2, 6))).row
    assert row is not None
    assert row.shape == (1, 2, 1, 6)
    for wrong in (np.full((2, 6), np.nan), np.ones(6)):
        with pytest.raises(ConfigError, match=r"mean must be finite, of shape \(H, D\)"):
            fixed_centre(wrong)
    with pytest.raises(ConfigError, match="tokens must be at least 0"):
        sequence_centre(-5)
