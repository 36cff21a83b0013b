from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.errors import ConfigError
from kvcompress.stages.gain_coder import GainCoder
from kvcompress.stages.levels import LloydMaxLevels
from kvcompress.stages.sketch_coder import SketchCoder
from kvcompress.stages.transform import RandomisedHadamard
from tests.stages.test_gain_coder import unit_rows

# d times the mean squared error of inner products with unit queries, orthogonal sketch, d = 128.
ERROR = {2: 0.203, 3: 0.066, 4: 0.019}


def products(bits: int, seed: int, x: np.ndarray, q: np.ndarray) -> np.ndarray:
    rotation = RandomisedHadamard(128, 2 * seed)
    coder = SketchCoder(128, 1, bits, seed=2 * seed + 1)
    got = rotation.inverse(coder.decode(coder.encode(rotation.forward(mx.array(x)))))
    return np.array((got * mx.array(q)).sum(-1))


@pytest.mark.parametrize("bits", ERROR)
def test_inner_products_have_the_error_of_the_table(bits: int) -> None:
    x, q = unit_rows(128), unit_rows(128, seed=1)
    error = products(bits, 0, x, q) - (x * q).sum(-1)
    assert 128 * (error**2).mean() == pytest.approx(ERROR[bits], rel=0.08)


@pytest.mark.parametrize("bits", ERROR)
def test_inner_products_are_unbiased_over_sketches(bits: int) -> None:
    x, q = unit_rows(128, rows=8), unit_rows(128, rows=8)  # equal: the products are all 1
    got = np.stack([products(bits, seed, x, q) for seed in range(200)])
    spread = got.std(0) / np.sqrt(len(got))
    assert (np.abs(got.mean(0) - 1) < 4 * spread + 1e-3).all()
    variance = np.sqrt(3) * np.pi**2 / 128 * 4.0**-bits
    assert (got.var(0) < 1.2 * variance).all()


def test_the_plain_code_is_better_at_equal_bits() -> None:
    x, q = unit_rows(128), unit_rows(128, seed=1)
    rotation = RandomisedHadamard(128, 0)
    z = rotation.forward(mx.array(x))
    for bits, worse in ERROR.items():
        plain = GainCoder(LloydMaxLevels(128, bits), 1, form="unbiased")
        got = np.array(rotation.inverse(plain.decode(plain.encode(z))))
        assert 128 * (((got - x) * q).sum(-1) ** 2).mean() < 0.75 * worse


def test_bytes() -> None:
    coder = SketchCoder(128, 4, 3)
    assert sum(f.bytes_per_token for f in coder.fields) == 4 * (128 * 3 // 8 + 4)
    assert sum(f.payload_bits for f in coder.fields) == 3 * 128


@pytest.mark.parametrize("bits", [1, 0, 9])
def test_one_bit_cannot_be_shared(bits: int) -> None:
    with pytest.raises(ConfigError, match=rf"bits must be from 2 to 8, .* \(got {bits}\)"):
        SketchCoder(128, 1, bits)
