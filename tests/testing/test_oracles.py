"""The oracles agree with MLX where MLX does the same, and with themselves where it does not."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.layers import LayerSpec
from kvcompress.testing import oracles
from kvcompress.testing.strategies import layers, masks


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@given(data=st.data(), seed=st.integers(0, 99))
def test_attention_is_mlx_attention(data: st.DataObject, seed: int) -> None:
    queries, count = data.draw(st.integers(1, 5)), data.draw(st.integers(5, 12))
    mask = data.draw(masks(2, 4, queries, count, mx.float32))
    logits = data.draw(st.sampled_from((None, np.array([0.5, -2.0, 3.0, 0.0]))))
    q, k, v = (
        normal(seed, 2, 4, queries, 8),
        normal(seed, 2, 2, count, 8),
        normal(1, 2, 2, count, 8),
    )
    wanted = mx.fast.scaled_dot_product_attention(
        *(mx.array(x.astype(np.float32)) for x in (q, k, v)),
        scale=0.3,
        mask=mask,
        sinks=None if logits is None else mx.array(logits.astype(np.float32)),
    )
    plain = np.array(mask) if isinstance(mask, mx.array) else mask
    got = oracles.attention(q, k, v, scale=0.3, mask=plain, sinks=logits)
    np.testing.assert_allclose(got, np.array(wanted), atol=1e-5)


@given(layer=layers(head_dims=(16, 63)), start=st.integers(0, 300))
def test_rope_is_mlx_rope(layer: LayerSpec, start: int) -> None:
    x = normal(start, 1, 2, 5, layer.head_dim)
    got = oracles.rope(x, range(start, start + 5), layer.rotary)
    if layer.rotary is None:
        np.testing.assert_array_equal(got, x)
        return
    wanted = layer.rotary.rotate(mx.array(x.astype(np.float32)), range(start, start + 5))
    np.testing.assert_allclose(got, np.array(wanted), atol=2e-4)


@given(bits=st.integers(1, 12), count=st.integers(1, 70), seed=st.integers(0, 99))
def test_bits_come_back(bits: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, count))
    words = oracles.pack_bits(codes, bits)
    assert words.dtype == np.uint32
    assert words.shape == (3, -(-count * bits // 32))
    np.testing.assert_array_equal(oracles.unpack_bits(words, bits, count), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_bits_lie_as_in_mlx(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (2, 64))
    words = mx.array(oracles.pack_bits(codes, bits))
    ones, zeros = mx.ones((2, 1)), mx.zeros((2, 1))
    decoded = mx.dequantize(words, ones, zeros, group_size=64, bits=bits)
    np.testing.assert_array_equal(np.array(decoded), codes)


def test_the_lowest_of_equals_is_nearest() -> None:
    best, gaps = oracles.nearest(np.array([[0.0], [0.9]]), np.array([[1.0], [-1.0], [1.0]]))
    assert best.tolist() == [0, 0]
    np.testing.assert_allclose(gaps, [1.0, 0.01])


def test_hadamard_is_orthonormal_and_mlx_transform() -> None:
    matrix = oracles.hadamard(64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(64), atol=1e-12)
    np.testing.assert_allclose(np.array(mx.hadamard_transform(mx.eye(64))), matrix, atol=1e-6)
    with pytest.raises(ValueError, match="60"):
        oracles.hadamard(60)
