from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.stages.pack import byte_planes, pack, unpack, words


def oracle(codes: np.ndarray, bits: int) -> np.ndarray:
    """The same stream of bits, one bit at a time."""
    stream = (codes[..., None] >> np.arange(bits)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    padded = np.zeros((*codes.shape[:-1], words(codes.shape[-1], bits) * 32), np.uint8)
    padded[..., : stream.shape[-1]] = stream
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4")


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    bits = draw(st.integers(1, 12))
    shape = (*draw(st.sampled_from([(), (3,), (1, 2, 4)])), draw(st.integers(1, 200)))
    seed = draw(st.integers(0, 2**16))
    return np.random.default_rng(seed).integers(0, 2**bits, shape), bits


@given(rows())
@settings(deadline=None, max_examples=150)
def test_pack_is_a_contiguous_little_endian_stream(case: tuple[np.ndarray, int]) -> None:
    codes, bits = case
    packed = pack(mx.array(codes.astype(np.uint16 if bits > 8 else np.uint8)), bits)
    assert packed.dtype == mx.uint32
    np.testing.assert_array_equal(np.array(packed), oracle(codes, bits))


@given(rows())
@settings(deadline=None, max_examples=150)
def test_unpack_undoes_pack(case: tuple[np.ndarray, int]) -> None:
    codes, bits = case
    got = unpack(mx.array(oracle(codes, bits)), bits, codes.shape[-1])
    assert got.dtype == (mx.uint16 if bits > 8 else mx.uint8)
    np.testing.assert_array_equal(np.array(got), codes)


@pytest.mark.parametrize("bits", range(1, 13))
def test_unpack_reads_slices_of_tokens(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (1, 2, 9, 80))
    packed = mx.array(oracle(codes, bits))[:, :, 3:7]
    np.testing.assert_array_equal(np.array(unpack(packed, bits, 80)), codes[:, :, 3:7])


@given(rows())
@settings(deadline=None, max_examples=150)
def test_byte_planes_hold_every_run_th_code(case: tuple[np.ndarray, int]) -> None:
    codes, bits = case
    planes = byte_planes(mx.array(oracle(codes, bits)), bits, codes.shape[-1])
    even = 8 % bits == 0 and codes.shape[-1] % (8 // bits) == 0
    assert len(planes) == (8 // bits if even else 1)
    for place, plane in enumerate(planes):
        own = codes[..., place :: len(planes)] << place * bits
        np.testing.assert_array_equal(np.array(plane), own)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_words_are_those_of_mlx(bits: int) -> None:
    x = mx.random.normal((2, 5, 128), key=mx.random.key(bits))
    packed, scales, biases = mx.quantize(x, group_size=64, bits=bits)
    ones, zeros = mx.ones_like(scales), mx.zeros_like(biases)
    codes = mx.dequantize(packed, ones, zeros, group_size=64, bits=bits).astype(mx.uint8)
    assert mx.array_equal(pack(codes, bits), packed)
    assert mx.array_equal(unpack(packed, bits, 128), codes)


@pytest.mark.parametrize("bits", [0, -1, 13])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=rf"bits must be from 1 to 12 \(got {bits}\)"):
        pack(mx.zeros((1, 8), mx.uint8), bits)
    with pytest.raises(ConfigError, match="bits must be from 1 to 12"):
        unpack(mx.zeros((1, 8), mx.uint32), bits, 8)


def test_unpack_refuses_rows_of_another_length() -> None:
    with pytest.raises(ConfigError, match=r"64 codes of 3 bits take 6 words a row \(got 5\)"):
        unpack(mx.zeros((1, 5), mx.uint32), 3, 64)
