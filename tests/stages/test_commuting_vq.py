from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.fit.em import fit_commuting
from kvcompress.layers import Rotary
from kvcompress.stages.base import Quantiser
from kvcompress.stages.commuting_vq import CommutingVQ, complex_pairs
from kvcompress.stages.pack import pack
from kvcompress.stages.vq_coder import VQCoder
from tests.stages.vq_cases import HEADS, commuting, normal, rows

FORMS = [(16, 0, False), (16, 0, True), (16, 4, False), (16, 4, True), (16, 16, False)]


def centres(vq: CommutingVQ) -> np.ndarray:
    """``(H, R, N, N, D)`` from the definition: ``z_a + i z_b`` and ``u_a + v_b``."""
    parts = np.array(vq.turning.astype(mx.float32)).astype(np.float64)
    z = parts[:, :, :, 0] + 1j * parts[:, :, :, 1]
    c = z[:, :, :, None] + 1j * z[:, :, None]
    if vq.rotary is not None and vq.rotary.traditional:
        whole = np.stack([c.real, c.imag], axis=-1).reshape(*c.shape[:-1], -1)
    else:
        whole = np.concatenate([c.real, c.imag], axis=-1)
    if vq.still is not None:
        free = np.array(vq.still.astype(mx.float32)).astype(np.float64)
        rest = free[:, :, 0, :, None] + free[:, :, 1, None]
        whole = np.concatenate([whole, rest], axis=-1)
    return whole


@given(st.sampled_from(FORMS), st.integers(1, 4), st.sampled_from([1, 2]), st.integers(0, 99))
def test_codes_are_greedy_over_all_centres(
    form: tuple[int, int, bool], bits: int, batch: int, seed: int
) -> None:
    dim, rest, traditional = form
    vq = commuting(dim, bits, rest, traditional)
    assert isinstance(vq, Quantiser)
    assert (vq.dim, vq.bits, vq.codes) == (dim, bits, 6)
    x = rows(dim, 5, seed, batch)
    codes = np.array(vq.encode(x)).astype(np.int64)
    assert codes.max() < 2**bits
    left, every = np.array(x).astype(np.float64), centres(vq)
    for stage in range(3):
        b, a = codes[..., 2 * stage], codes[..., 2 * stage + 1]
        distances = np.square(left[..., None, None, :] - every[None, :, stage][:, :, None]).sum(-1)
        head = np.arange(HEADS)[None, :, None]
        after = left - every[head, stage, a, b]
        lengths = np.square(after).sum(-1)
        np.testing.assert_allclose(lengths, distances.min((-1, -2)), rtol=1e-4, atol=1e-4)
        assert (lengths <= np.square(left).sum(-1) + 1e-4).all()
        left = after
    decoded = vq.decode(mx.array(codes.astype(np.uint8)))
    assert decoded.dtype == mx.float32
    np.testing.assert_allclose(decoded, np.array(x) - left, atol=1e-5)


@pytest.mark.parametrize("bits", [1, 3, 6])
def test_data_in_the_span_of_one_stage_is_met_exactly(bits: int) -> None:
    vq = commuting(16, bits, rest=4, stages=1)
    codes = mx.array(
        np.random.default_rng(0).integers(0, 2**bits, (1, HEADS, 40, 2)).astype(np.uint8)
    )
    x = vq.decode(codes)
    np.testing.assert_allclose(vq.decode(vq.encode(x)), x, atol=1e-5)


def turned(vq: CommutingVQ, position: int) -> CommutingVQ:
    """The same codes' quantiser with each table entry rotated as a key at ``position``."""
    assert vq.rotary is not None
    H, R, N, _, P = vq.turning.shape
    book = vq.book().reshape(H, R, 2, N, -1)[:, :, 1]  # z, as channels
    rotated = vq.rotary.rotate(book.reshape(1, H * R * N, 1, -1), [position])
    pairs, rest = complex_pairs(np.array(rotated).reshape(H, R, N, -1), vq.rotary)
    assert rest.shape[-1] == vq.dim - 2 * P
    return CommutingVQ(np.stack([pairs.real, pairs.imag], axis=3), vq.rotary, vq.still)


@given(st.sampled_from(FORMS[:4]), st.integers(0, 131_072), st.integers(0, 99))
def test_rotating_a_decoded_key_is_decoding_with_rotated_tables(
    form: tuple[int, int, bool], position: int, seed: int
) -> None:
    vq = commuting(form[0], 4, form[1], form[2])
    assert vq.rotary is not None
    codes = vq.encode(rows(form[0], 1, seed))
    expected = vq.rotary.rotate(vq.decode(codes), range(position, position + 1))
    np.testing.assert_allclose(turned(vq, position).decode(codes), expected, atol=2e-5)


def test_an_unconstrained_book_does_not_commute() -> None:
    vq = commuting(16, 4)
    assert vq.rotary is not None
    for position in (1, 1000, 131_072):

        def gap(book: mx.array, position: int = position) -> float:
            """How far the rotated second table is from ``i`` times the rotated first."""
            assert vq.rotary is not None
            rows_ = vq.rotary.rotate(book.reshape(1, -1, 1, 16), [position]).reshape(-1, 2, 16, 16)
            imaginary, real = rows_[:, 0], rows_[:, 1]
            times_i = mx.concatenate([-real[..., 8:], real[..., :8]], axis=-1)
            return float((mx.square(imaginary - times_i).mean() / mx.square(real).mean()).item())

        assert gap(vq.book()) < 1e-10
        assert gap(mx.array(normal(*vq.book().shape))) > 1


def test_two_codes_are_packed_as_one_index_of_the_paper() -> None:
    vq = commuting(16, 6)
    x = rows(16, 7)
    codes = np.array(vq.encode(x)).astype(np.uint16)
    index = 64 * codes[..., 1::2] + codes[..., 0::2]
    stored = VQCoder(vq, HEADS).encode(x)["codes"]
    assert mx.array_equal(stored, pack(mx.array(index), 12))


def test_bits_are_those_of_the_paper() -> None:
    coder = VQCoder(commuting(64, 6, stages=5), HEADS, gain=True)
    codes, gain = coder.fields
    assert codes.payload_bits == 12 * 5
    assert (gain.heads, gain.bytes_per_token) == (1, 2)
    bits = coder.fields[0].payload_bits / 64 + 8 * gain.bytes_per_token / (64 * HEADS)
    assert bits == 12 * 5 / 64 + 16 / (64 * HEADS)


def test_tables_hold_every_score() -> None:
    vq = commuting(16, 3, rest=4)
    q = rows(16, 4, 1, batch=2)
    got = vq.tables(q)
    assert got.shape == (2, HEADS, 6, 4, 8)
    expected = np.einsum("bhmd,hcnd->bhcmn", np.array(q), np.array(vq.book()))
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [16, 12])
def test_fitted_tables_give_the_error_of_the_fit(dims: int, traditional: bool) -> None:
    rotary = Rotary(dims, traditional)
    x = normal(HEADS, 500, 16)
    pairs, rest = complex_pairs(x, rotary)
    fit = fit_commuting(pairs, rest, stages=3, entries=8, seed=0, rounds=4)
    vq = CommutingVQ(fit.turning, rotary, fit.still if dims < 16 else None)
    decoded = vq.decode(vq.encode(mx.array(x)[None]))
    error = mx.square(decoded - mx.array(x)).sum(-1).mean(-1)[0]
    np.testing.assert_allclose(error, fit.error[-1], rtol=1e-3)


def test_pairs_follow_the_rotation() -> None:
    x = np.arange(12.0)[None]
    pairs, rest = complex_pairs(x, Rotary(8))
    assert pairs.tolist() == [[0 + 4j, 1 + 5j, 2 + 6j, 3 + 7j]]
    assert rest.tolist() == [[8, 9, 10, 11]]
    pairs, _ = complex_pairs(x, Rotary(8, traditional=True))
    assert pairs.tolist() == [[0 + 1j, 2 + 3j, 4 + 5j, 6 + 7j]]
    pairs, rest = complex_pairs(x, None)
    assert pairs.shape == (1, 0)
    assert rest.tolist() == x.tolist()


def test_bytes_are_those_of_the_tables() -> None:
    vq = commuting(16, 4, rest=4)
    assert vq.table_bytes == 4 * HEADS * 3 * (16 * 12 + 2 * 16 * 4)
    half = CommutingVQ(vq.turning.astype(mx.float16), vq.rotary)
    assert half.table_bytes == 2 * HEADS * 3 * 16 * 12


@pytest.mark.parametrize(
    ("turning", "still", "message"),
    [
        (np.ones((2, 3, 8, 2)), None, "turning must have 5 axes"),
        (np.ones((2, 3, 8, 2, 7)), None, r"\(H, R, N, 2, 8\) for 16 rotating channels"),
        (np.ones((2, 3, 6, 2, 8)), None, r"\(got 6\)"),
        (np.ones((2, 3, 128, 2, 8)), None, "at most 64 entries"),
        (np.ones((2, 3, 8, 2, 8)), np.ones((2, 3, 2, 4, 5)), r"still must have shape \(2, 3, 2, 8"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    turning: np.ndarray, still: np.ndarray | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CommutingVQ(turning, Rotary(16), still)
