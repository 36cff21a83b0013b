from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.layers import Rotary
from kvcompress.stages.base import Transform
from kvcompress.stages.linear import Linear
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.whiten import WhitenPairs, block_metric, rotated_moment, whitening
from tests.stages.vq_cases import HEADS, cut, normal, places_round_alike, product, rows


def moments(dim: int, seed: int = 0) -> np.ndarray:
    """Second moments of correlated queries with channels of unequal size."""
    spread = np.geomspace(0.3, 3, dim, dtype=np.float32)
    q = normal(HEADS, 40 * dim, dim, seed=seed) @ normal(HEADS, dim, dim, seed=seed + 1) * spread
    return np.asarray(q.swapaxes(1, 2) @ q / (40 * dim))


def make(kind: str, moment: np.ndarray) -> Linear | WhitenPairs:
    if kind in ("pairs", "traditional pairs"):
        return WhitenPairs.of(moment, Rotary(12, kind == "traditional pairs"))
    return whitening(moment, int(kind))


KINDS = ["1", "2", "4", "16", "pairs", "traditional pairs"]


@given(st.sampled_from(KINDS), st.integers(1, 2), st.integers(0, 99))
def test_the_law_of_transforms(kind: str, batch: int, seed: int) -> None:
    stage = make(kind, moments(16, seed))
    assert isinstance(stage, Transform)
    assert stage.dim == 16
    x, q = rows(16, 6, seed, batch), rows(16, 4, seed + 1, batch)
    z = stage.forward(x)
    assert z.shape == x.shape
    assert z.dtype == mx.float32
    np.testing.assert_allclose(stage.inverse(z), x, atol=2e-3)
    scores = stage.query(q) @ z.swapaxes(-1, -2)
    np.testing.assert_allclose(scores, q @ x.swapaxes(-1, -2), atol=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 3, 7, 32, 45])
def test_tokens_are_mapped_alone(kind: str, step: int) -> None:
    stage, x = make(kind, moments(16)), rows(16, 90, 1)
    parts = [stage.forward(x[:, :, i : i + step]) for i in range(0, 90, step)]
    joined, whole = mx.concatenate(parts, axis=2), stage.forward(x)
    if places_round_alike():
        assert mx.array_equal(joined, whole)
    np.testing.assert_allclose(joined, whole, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_after_are_expected_score_errors(kind: str) -> None:
    # E[(q e)^2] = e H e^T = |e L|^2, with the correlations that the blocks keep.
    moment = moments(16)
    stage = make(kind, moment)
    kept = np.zeros((16, 16), bool)
    if "pairs" in kind:
        step = 1 if kind == "traditional pairs" else 6
        first = range(0, 12, 2) if step == 1 else range(6)
        blocks = [(c, c + step) for c in first] + [(c,) for c in range(12, 16)]
    else:
        size = int(kind)
        blocks = [tuple(range(c, c + size)) for c in range(0, 16, size)]
    for block in blocks:
        kept[np.ix_(block, block)] = True
    H = np.where(kept, moment, 0).astype(np.float64)
    H = H / np.trace(H, axis1=1, axis2=2)[:, None, None] * 16
    e = rows(16, 20, 3)
    expected = np.einsum("bhti,hij,bhtj->bht", np.array(e), H, np.array(e))
    np.testing.assert_allclose(mx.square(stage.forward(e)).sum(-1), expected, rtol=1e-4)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 99))
def test_nearest_after_whitening_is_nearest_in_the_score(size: int, seed: int) -> None:
    # A2ATS, Eq. 14 to 18: argmin (k - c) H (k - c)^T by brute force.
    moment = moments(16, seed)
    book = normal(HEADS, 16 // size, 32, size, seed=seed)
    x = rows(16, 15, seed)
    e = cut(x, size)[..., None, :].astype(np.float64) - book[None, :, None]
    metric = block_metric(moment, size)
    loss = np.einsum("bhtnki,hnij,bhtnkj->bhtnk", e, metric, e)

    stage = whitening(moment, size)
    through = ProductVQ(mx.array(book) @ stage.factor).encode(stage.forward(x))
    direct = ProductVQ(book, metric=metric).encode(x)
    for codes in (through, direct):
        index = np.array(codes).astype(np.int64)[..., None]
        chosen = np.take_along_axis(loss, index, axis=-1)[..., 0]
        np.testing.assert_allclose(chosen, loss.min(-1), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(
    "rotary", [Rotary(16), Rotary(12), Rotary(12, traditional=True), Rotary(16, scale=0.5)]
)
def test_moments_of_rotated_queries(rotary: Rotary) -> None:
    q = rows(16, 400)
    plain = np.array(q)[0].astype(np.float64)
    moment = plain.swapaxes(1, 2) @ plain / 400
    distances = (3, 70, 1000)
    expected = np.zeros_like(moment)
    for d in distances:
        turned = np.array(rotary.rotate(q, [d] * 400))[0].astype(np.float64)
        expected += turned.swapaxes(1, 2) @ turned / 1200
    got = rotated_moment(moment, rotary, distances)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    np.testing.assert_allclose(rotated_moment(moment, rotary, [0]), moment, atol=1e-12)
    # Pairs that turn fast see queries from every side.
    far = rotated_moment(moment, rotary, range(1000, 3000))
    first, second = (0, 1) if rotary.traditional else (0, rotary.dims // 2)
    np.testing.assert_allclose(far[:, first, first], far[:, second, second], rtol=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 3.7, 1e-12, 1e12])
def test_queries_alike_in_all_channels_change_nothing(kind: str, scale: float) -> None:
    stage = make(kind, np.broadcast_to(scale * np.eye(16), (HEADS, 16, 16)))
    x = rows(16, 30)
    assert mx.array_equal(stage.forward(x), x)
    assert mx.array_equal(stage.inverse(x), x)
    assert mx.array_equal(stage.query(x), x)
    vq = product(16, 6)
    assert mx.array_equal(vq.encode(stage.forward(x)), vq.encode(x))


def test_moments_of_too_few_queries_are_made_definite() -> None:
    q = normal(HEADS, 1, 16)
    stage = whitening(q.swapaxes(1, 2) @ q, 16)
    x = rows(16, 8)
    assert mx.isfinite(stage.inverse(stage.forward(x))).all().item()
    assert np.isfinite(np.array(stage.back)).all()


def test_bytes_are_those_of_the_factors() -> None:
    stage = whitening(moments(16), 4)
    assert stage.table_bytes == 2 * HEADS * 4 * 4 * 4 * 4
    assert make("pairs", moments(16)).table_bytes == 4 * HEADS * (2 * 3 * 6 + 4)
    x = rows(16, 3)
    assert mx.array_equal(copy.deepcopy(stage).forward(x), stage.forward(x))


@pytest.mark.parametrize(
    ("moment", "size", "message"),
    [
        (np.ones((2, 16)), 4, "moments must be"),
        (np.ones((2, 16, 8)), 4, "moments must be"),
        (np.ones((2, 16, 16)), 3, "not divisible by the block size 3"),
        (np.ones((2, 0, 0)), 1, "moments must be"),
        (np.zeros((2, 16, 16)), 4, "positive trace"),
        (np.full((2, 16, 16), np.nan), 4, "must be finite"),
        (np.ones((2, 16, 16)) - 0.5 * np.eye(16), 4, "negative directions"),
    ],
)
def test_what_is_no_second_moment_is_refused(moment: np.ndarray, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"whiten: .*{message}"):
        whitening(moment, size)
