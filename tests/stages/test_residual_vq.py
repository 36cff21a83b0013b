from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.fit.residual import fit_residual
from kvcompress.stages.base import Quantiser
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.residual_vq import ResidualVQ
from tests.stages.vq_cases import HEADS, normal, product, residual, rows


@given(st.integers(1, 6), st.sampled_from([2, 4, 16]), st.integers(0, 99))
def test_codes_are_greedy_and_add_up(bits: int, size: int, seed: int) -> None:
    vq = residual(16, bits, size)
    assert isinstance(vq, Quantiser)
    spaces = 16 // size
    assert (vq.dim, vq.bits, vq.codes, vq.sub_dim) == (16, bits, 3 * spaces, size)
    x = rows(16, 9, seed, batch=2)
    codes = vq.encode(x)
    left = np.array(x)
    for place, stage in enumerate(vq.stages):
        part = codes[..., place * spaces : (place + 1) * spaces]
        assert mx.array_equal(part, stage.encode(mx.array(left)))
        after = left - np.array(stage.decode(part))
        if place:  # from the second stage on the codebooks hold a zero
            lengths = np.square(after).sum(-1), np.square(left).sum(-1)
            assert (lengths[0] <= lengths[1] * (1 + 1e-5) + 1e-6).all()
        left = after
    np.testing.assert_allclose(vq.decode(codes), np.array(x) - left, atol=1e-5)


def test_fitted_stages_lower_the_error_one_by_one() -> None:
    points = normal(HEADS, 4, 2000, 4)  # heads, sub-spaces, vectors, channels
    fit = fit_residual(points, 16, 3, seed=0)
    x = mx.array(points.transpose(0, 2, 1, 3).reshape(1, HEADS, 2000, 16))
    for stages in (1, 2, 3):
        vq = ResidualVQ.of([mx.array(book) for book in fit.codebooks[:stages]])
        error = mx.square(vq.decode(vq.encode(x)) - x).sum(-1).mean().item()
        assert error == pytest.approx(4 * fit.error[stages].mean(), rel=1e-3)


def test_two_stages_of_gaussian_vectors_have_the_error_of_the_table() -> None:
    # One codebook of 8 + 8 bits for 8 channels, 2 bits a channel: 0.106 when fitted to its limit.
    fit = fit_residual(normal(16384, 8), 256, 2, seed=0, rounds=10)
    vq = ResidualVQ.of([mx.array(book[None, None]) for book in fit.codebooks], 32)
    x = rows(32, 1500, 3)
    error = mx.square(vq.decode(vq.encode(x)) - x).mean().item()
    assert error == pytest.approx(0.106, rel=0.06)


def test_tables_hold_every_score() -> None:
    vq = residual(16, 4)
    q, codes = rows(16, 3), vq.encode(rows(16, 5, 1))
    got = vq.tables(q)
    assert got.shape == (1, HEADS, 12, 3, 16)
    index = mx.broadcast_to(codes.swapaxes(2, 3)[:, :, :, None], (1, HEADS, 12, 3, 5))
    scores = mx.take_along_axis(got, index.astype(mx.int32), axis=-1).sum(axis=2)
    np.testing.assert_allclose(scores, q @ vq.decode(codes).swapaxes(-1, -2), atol=1e-4)


def test_bytes_are_those_of_all_stages() -> None:
    assert residual(16, 4).table_bytes == 3 * product(16, 4).table_bytes


@pytest.mark.parametrize("stages", [(), (product(16, 4), product(16, 5))])
def test_stages_must_fit_together(stages: tuple[ProductVQ, ...]) -> None:
    with pytest.raises(ConfigError, match="ResidualVQ: stages must be at least one, of equal"):
        ResidualVQ(stages)
