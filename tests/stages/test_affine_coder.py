from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.errors import ConfigError
from kvcompress.stages.affine_coder import AffineCoder, legal_groups

CASES = [(64, 64), (64, 32), (96, 32), (128, 128), (80 * 2, 32)]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("dim", "group"), CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_words_and_values_are_those_of_mlx(bits: int, dim: int, group: int, dtype: str) -> None:
    x = mx.random.normal((1, 2, 5, dim), key=mx.random.key(bits)).astype(getattr(mx, dtype))
    coder = AffineCoder(dim, 2, bits, group, dtype)
    fields = coder.encode(x.astype(mx.float32))
    codes, scales, biases = mx.quantize(x, group_size=group, bits=bits)
    assert mx.array_equal(fields["codes"], codes)
    stored = mx.float16 if dtype == "float32" else getattr(mx, dtype)
    assert mx.array_equal(fields["scales"], scales.astype(stored))
    assert mx.array_equal(fields["biases"], biases.astype(stored))
    wide = [array.astype(mx.float32) for array in (fields["scales"], fields["biases"])]
    expected = mx.dequantize(codes, *wide, group_size=group, bits=bits)
    np.testing.assert_allclose(coder.decode(fields), expected, atol=2e-6)


def test_bytes() -> None:
    coder = AffineCoder(128, 8, 4, 64, "bfloat16")
    assert sum(f.bytes_per_token for f in coder.fields) == 8 * (64 + 2 * 4)
    assert AffineCoder(128, 8, 4, 64, "float32").fields[1].dtype == "float16"


@pytest.mark.parametrize("bits", [0, 1, 7, 9])
def test_bits_that_mlx_has_not_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=rf"bits must be one of 2, 3, 4, 5, 6, 8 \(got {bits}\)"):
        AffineCoder(64, 1, bits)


def test_groups_must_divide_the_head() -> None:
    assert legal_groups(128) == (128, 64, 32)
    assert legal_groups(96) == (32,)
    assert legal_groups(80) == ()
    with pytest.raises(ConfigError, match=r"one of 32 to divide head_dim 96 \(got 64\)"):
        AffineCoder(96, 1, 4, 64)
    with pytest.raises(ConfigError, match=r"one of none to divide head_dim 80 \(got 32\)"):
        AffineCoder(80, 1, 4, 32)
