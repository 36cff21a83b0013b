"""Distortion and inner products of the gain coder against published and measured tables."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.errors import ConfigError
from kvcompress.stages.gain_coder import GainCoder
from kvcompress.stages.levels import LloydMaxLevels, UniformLevels, scalar_levels
from kvcompress.stages.transform import RandomisedHadamard

ROWS = 8192
DISTORTION = {
    64: (0.3584, 0.1145, 0.0334, 0.00913),
    128: (0.3609, 0.1160, 0.0340, 0.00931),
    256: (0.3621, 0.1167, 0.0343, 0.00941),
}


def unit_rows(dim: int, rows: int = ROWS, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((1, 1, rows, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def coded(coder: GainCoder, x: np.ndarray, seed: int = 0) -> np.ndarray:
    rotation = RandomisedHadamard(x.shape[-1], seed)
    z = rotation.forward(mx.array(x))
    return np.array(rotation.inverse(coder.decode(coder.encode(z))))


@pytest.mark.parametrize("dim", DISTORTION)
def test_distortion_is_that_of_the_table(dim: int) -> None:
    x = unit_rows(dim)
    for bits, expected in enumerate(DISTORTION[dim], start=1):
        got = coded(GainCoder(LloydMaxLevels(dim, bits), 1, form="raw"), x)
        error = float(((got - x) ** 2).sum(-1).mean())
        assert error == pytest.approx(expected, rel=0.03)
        grid = coded(GainCoder(UniformLevels(dim, bits), 1, form="raw"), x)
        assert error * 0.99 < ((grid - x) ** 2).sum(-1).mean() < error * 1.23


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2, 5, 128])
def test_the_bounds_hold_for_fixed_inputs_over_rotations(bits: int, channels: int) -> None:
    # TurboQuant, theorem 1: at most sqrt(3) pi / 2 / 4^bits for any input, sparse ones included.
    x = np.zeros((1, 1, 1, 128), np.float32)
    x[..., :channels] = np.random.default_rng(channels).standard_normal(channels)
    x /= np.linalg.norm(x)
    coder = GainCoder(LloydMaxLevels(128, bits), 1, form="raw")
    errors = [float(((coded(coder, x, seed) - x) ** 2).sum()) for seed in range(60)]
    assert 4.0**-bits <= np.mean(errors) <= np.sqrt(3) * np.pi / 2 * 4.0**-bits


@pytest.mark.parametrize("kind", ["lloyd-max", "uniform"])
def test_slopes_of_the_forms(kind: str) -> None:
    x = unit_rows(128)
    for bits in (1, 2, 3, 4):
        quantiser = scalar_levels(128, bits, kind)  # type: ignore[arg-type]
        slope = {
            form: float((coded(GainCoder(quantiser, 1, form=form), x) * x).sum(-1).mean())  # type: ignore[arg-type]
            for form in ("raw", "matched", "unbiased")
        }
        if kind == "lloyd-max":
            assert slope["raw"] == pytest.approx(1 - DISTORTION[128][bits - 1], rel=0.01)
            matched = np.sqrt(1 - DISTORTION[128][bits - 1])
            assert slope["matched"] == pytest.approx(matched, rel=0.01)
        assert slope["unbiased"] == pytest.approx(1, abs=2e-4)
        assert slope["raw"] < slope["matched"] < slope["unbiased"]


@pytest.mark.parametrize(
    ("bits", "raw", "unbiased"), [(2, 0.115, 0.128), (3, 0.034, 0.0346), (4, 0.0095, 0.0094)]
)
def test_inner_products_have_the_error_of_the_table(bits: int, raw: float, unbiased: float) -> None:
    x = unit_rows(128)
    q = unit_rows(128, seed=1)
    for form, expected in (("raw", raw), ("unbiased", unbiased)):
        got = coded(GainCoder(LloydMaxLevels(128, bits), 1, form=form), x)  # type: ignore[arg-type]
        assert 128 * (((got - x) * q).sum(-1) ** 2).mean() == pytest.approx(expected, rel=0.08)


def test_a_matched_gain_keeps_the_length() -> None:
    x = unit_rows(64) * 7
    for kind in ("lloyd-max", "uniform"):
        coder = GainCoder(scalar_levels(64, 2, kind), 1, form="matched")  # type: ignore[arg-type]
        norms = np.linalg.norm(coded(coder, x), axis=-1)
        np.testing.assert_allclose(norms, 7, rtol=2**-8)


def test_bytes_are_codes_and_two_for_the_gain() -> None:
    coder = GainCoder(UniformLevels(128, 3), 8)
    assert sum(f.bytes_per_token for f in coder.fields) == 8 * (128 * 3 // 8 + 2)
    assert sum(f.payload_bits for f in coder.fields) == 3 * 128


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"form must be one of 'raw', .* \(got 'best'\)"):
        GainCoder(UniformLevels(64, 4), 1, form="best")  # type: ignore[arg-type]
