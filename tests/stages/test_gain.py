from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.stages.gain import corrected, decode_gain, encode_gain, row_gain

TINY = 2.0**-126  # below it MLX may flush to zero


@given(st.floats(TINY, 2.0**127, width=32))
def test_sixteen_bits_keep_a_gain_to_two_to_the_minus_nine(gain: float) -> None:
    code = encode_gain(mx.array([gain], mx.float32))
    assert code.dtype == mx.uint16
    got = decode_gain(code)
    assert got.dtype == mx.float32
    assert got.item() == pytest.approx(gain, rel=2**-9)
    assert mx.array_equal(encode_gain(got), code)


def test_the_ends_of_the_range() -> None:
    got = decode_gain(encode_gain(mx.array([0.0, 3.4028235e38, float("inf")])))
    assert got[0].item() == 0.0
    assert mx.isfinite(got).all().item()
    assert got[1].item() == pytest.approx(3.4028235e38, rel=2**-8)


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=2, max_size=20))
def test_order_is_kept(gains: list[float]) -> None:
    decoded = np.array(decode_gain(encode_gain(mx.array(sorted(gains)))))
    assert (np.diff(decoded) >= 0).all()


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 65504.0, 1e30])
def test_rows_split_into_size_and_direction(size: float) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    gain, unit = row_gain(mx.array(rows) * size)
    np.testing.assert_allclose(
        np.array(gain) / size, np.sqrt((rows**2).mean(1, keepdims=True)), rtol=1e-5
    )
    np.testing.assert_allclose((np.array(unit) ** 2).mean(1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.array(unit * gain) / size, rows, rtol=1e-5)


def test_a_row_of_zeros_has_no_gain_and_stays_zero() -> None:
    gain, unit = row_gain(mx.zeros((2, 64)))
    assert not gain.any().item()
    assert not unit.any().item()


def test_each_form_makes_its_own_quantity_exact() -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((50, 64)).astype(np.float32) * 3
    gain, unit = row_gain(mx.array(rows))
    v = np.array(mx.round(unit))
    decoded = {
        form: np.array(corrected(gain, unit, mx.array(v), form)) * v
        for form in ("raw", "matched", "unbiased", "least-squares")
    }
    np.testing.assert_allclose(decoded["raw"], np.array(gain) * v)
    norms = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(np.linalg.norm(decoded["matched"], axis=1), norms, rtol=1e-5)
    overlap = (decoded["unbiased"] * rows).sum(1)
    np.testing.assert_allclose(overlap, norms**2, rtol=1e-5)
    errors = {form: ((got - rows) ** 2).sum(1) for form, got in decoded.items()}
    for form in ("raw", "matched", "unbiased"):
        assert (errors["least-squares"] <= errors[form] * (1 + 1e-5)).all()


def test_an_unbiased_gain_does_not_explode() -> None:
    unit = mx.ones((1, 4))
    gain = mx.array([[2.0]])
    for decoded in ([[1.0, -1.0, 1.0, -1.0]], [[-1.0] * 4], [[0.0] * 4], [[0.4, 0.0, 0.0, 0.0]]):
        got = corrected(gain, unit, mx.array(decoded), "unbiased")
        assert 0 < got.item() <= 2.0 / 0.2 + 1e-5
