"""The law of coders, for every coder alike."""

from __future__ import annotations

import copy
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.stages import affine_words
from kvcompress.stages.base import Coder
from kvcompress.stages.transform import RandomisedHadamard
from tests.stages.coder_cases import HEADS, MAKE, coder_dim, rows

KINDS = sorted(MAKE)


@given(
    st.sampled_from(KINDS),
    st.integers(1, 8),
    st.sampled_from([8, 33, 64, 80, 96, 128]),
    st.integers(1, 2),
    st.sampled_from([1, 2, 9]),
    st.sampled_from([1, 3, 17, 150]),
    st.integers(0, 999),
)
def test_the_law_of_coders(
    kind: str, bits: int, dim: int, batch: int, tokens: int, queries: int, seed: int
) -> None:
    coder = MAKE[kind](dim, bits)
    assert isinstance(coder, Coder)
    dim = coder_dim(coder)
    z = rows(dim, tokens, seed, batch) * 3
    fields = coder.encode(z)
    assert set(fields) == {f.name for f in coder.fields}
    for f in coder.fields:
        assert fields[f.name].shape == (batch, HEADS, tokens, f.width)
        assert fields[f.name].dtype == getattr(mx, f.dtype)
        assert f.payload_bits <= 8 * f.width * fields[f.name].itemsize

    decoded = coder.decode(fields)
    assert decoded.shape == z.shape
    assert decoded.dtype == mx.float32
    q = rows(dim, queries, seed + 1, batch)
    p = mx.softmax(rows(tokens, queries, seed + 2, batch), axis=-1)
    scale = float(mx.sqrt(mx.square(decoded).sum(-1).max()).item()) * dim**0.5
    np.testing.assert_allclose(
        coder.scores(q, fields), q @ decoded.swapaxes(-1, -2), atol=3e-6 * scale
    )
    np.testing.assert_allclose(coder.mix(p, fields), p @ decoded, atol=3e-6 * scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_the_quantised_kernels_agree(
    kind: str, bits: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    coder = MAKE[kind](dim, bits)
    # A slice of a longer run of tokens, as tiles of attention are.
    fields = {name: array[:, :, 3:12] for name, array in coder.encode(rows(dim, 16, 5, 2)).items()}
    q, p = rows(dim, 6, 6, 2), mx.softmax(rows(9, 6, 7, 2), axis=-1)
    expected = (coder.scores(q, fields), coder.mix(p, fields))
    monkeypatch.setattr(affine_words, "on_cpu", lambda: False)
    np.testing.assert_allclose(coder.scores(q, fields), expected[0], atol=2e-4)
    np.testing.assert_allclose(coder.mix(p, fields), expected[1], atol=2e-5)


@given(st.sampled_from(KINDS), st.integers(1, 8), st.integers(0, 99), st.integers(1, 8))
def test_tokens_are_coded_alone(kind: str, bits: int, seed: int, cut: int) -> None:
    coder = MAKE[kind](64, bits)
    z = rows(64, 9, seed)
    whole = coder.encode(z)
    parts = [coder.encode(z[:, :, :cut]), coder.encode(z[:, :, cut:])]
    for name, array in whole.items():
        joined = mx.concatenate([part[name] for part in parts], axis=2)
        assert mx.array_equal(array, joined), name
    swapped = coder.encode(z[:, ::-1])
    for name, array in whole.items():
        assert mx.array_equal(swapped[name], array[:, ::-1]), name


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "affine"])
def test_a_row_twice_as_long_has_the_same_codes(kind: str) -> None:
    coder = MAKE[kind](64, 4)
    z = rows(64, 8, 1)
    once, twice = coder.encode(z), coder.encode(z * 2)
    for f in coder.fields:
        if f.payload_bits:
            assert mx.array_equal(once[f.name], twice[f.name])
    np.testing.assert_allclose(coder.decode(twice), 2 * coder.decode(once), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_mean_less_error(kind: str) -> None:
    errors = []
    for bits in (2, 3, 4, 5, 6, 8):
        coder = MAKE[kind](64, bits)
        z = rows(64, 256, 2)
        errors.append(mx.square(coder.decode(coder.encode(z)) - z).mean().item())
    assert all(b < a for a, b in pairwise(errors)), errors


def hostile(dim: int) -> dict[str, mx.array]:
    noise = np.random.default_rng(0).standard_normal((1, HEADS, 6, dim)).astype(np.float32)
    huge, one_hot = noise.copy(), np.zeros_like(noise)
    huge[..., 1] = 3e4
    one_hot[..., 2] = 1.0
    return {
        "zeros": mx.zeros(noise.shape),
        "constant": mx.full(noise.shape, 3000.0),
        "huge channel": mx.array(huge),
        "one-hot": mx.array(one_hot),
        "duplicates": mx.array(np.repeat(noise[:, :, :1], 6, axis=2)),
        "largest float16": mx.array(np.sign(noise) * 65504),
        "1e30": mx.array(noise * np.float32(1e30)),
        "1e-30": mx.array(noise * np.float32(1e-30)),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("case", sorted(hostile(8)))
def test_hostile_rows_stay_finite_and_sensible(kind: str, bits: int, case: str) -> None:
    coder, rotation = MAKE[kind](64, bits), RandomisedHadamard(64)
    x = np.array(hostile(64)[case], dtype=np.float64)
    rotated = rotation.forward(hostile(64)[case])
    got = np.array(rotation.inverse(coder.decode(coder.encode(rotated))), dtype=np.float64)
    assert np.isfinite(got).all()
    if kind == "affine" and case in ("1e30", "1e-30"):
        return  # its float16 scales have no such range: the rows are clipped, or zero
    error = ((got - x) ** 2).sum(-1)
    assert (error <= 0.5 * (x**2).sum(-1)).all()
    if case == "duplicates":
        assert (got == got[:, :, :1]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_coders_can_be_copied(kind: str) -> None:
    coder = MAKE[kind](64, 4)
    z = rows(64, 4, 3)
    fields, again = coder.encode(z), copy.deepcopy(coder).encode(z)
    assert all(mx.array_equal(fields[name], again[name]) for name in fields)
