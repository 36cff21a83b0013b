from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.fit.em import (
    CommutingTables,
    Stage,
    Sums,
    fit_commuting,
    hard_sums,
    maximised,
    nearest_centres,
    soft_sums,
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def a_stage(entries: int, pairs: int, rest: int, seed: int = 0) -> Stage:
    rng = np.random.default_rng(seed)
    turning = rng.standard_normal((entries, pairs)) + 1j * rng.standard_normal((entries, pairs))
    still = rng.standard_normal((2, entries, rest))
    turning[0], still[:, 0] = 0, 0
    return Stage(turning, still)


def centres(stage: Stage) -> np.ndarray:
    """All ``(N, N, D)`` centres from the definition, in complex arithmetic."""
    turning = stage.turning[:, None] + 1j * stage.turning[None]
    rest = stage.still[0][:, None] + stage.still[1][None]
    return np.concatenate([turning.real, turning.imag, rest], axis=-1)


def distances(points: np.ndarray, stage: Stage) -> np.ndarray:
    return np.asarray(np.square(points[:, None, None] - centres(stage)).sum(-1))


def soft(points: np.ndarray, stage: Stage, temperature: float) -> np.ndarray:
    d = distances(points, stage)
    w = np.exp(-(d - d.min((1, 2), keepdims=True)) / temperature)
    return np.asarray(w / w.sum((1, 2), keepdims=True))


def sums_of(points: np.ndarray, w: np.ndarray) -> Sums:
    return Sums(w.sum(0), w.sum(2).T @ points, w.sum(1).T @ points, len(points))


sizes = st.tuples(st.integers(2, 6), st.integers(0, 4), st.integers(0, 4)).filter(
    lambda s: s[1] + s[2] > 0
)


@given(sizes, st.floats(0.05, 20), st.integers(0, 999))
def test_soft_sums_are_those_of_all_weights(
    size: tuple[int, int, int], temperature: float, seed: int
) -> None:
    _, pairs, rest = size
    points, stage = normal(150, 2 * pairs + rest, seed=seed), a_stage(*size, seed=seed)
    got = soft_sums(points, stage, temperature)
    expected = sums_of(points, soft(points, stage, temperature))
    np.testing.assert_allclose(got.joint, expected.joint, atol=1e-8)
    np.testing.assert_allclose(got.direct, expected.direct, atol=1e-8)
    np.testing.assert_allclose(got.turned, expected.turned, atol=1e-8)
    assert got.points == 150


def test_hard_sums_are_those_of_whole_weights() -> None:
    points, stage = normal(90, 7), a_stage(5, 3, 1)
    a, b = nearest_centres(points, stage)
    w = np.zeros((90, 5, 5))
    w[np.arange(90), a, b] = 1
    got, expected = hard_sums(points, a, b, 5), sums_of(points, w)
    np.testing.assert_array_equal(got.joint, expected.joint)
    np.testing.assert_allclose(got.direct, expected.direct, atol=1e-12)
    np.testing.assert_allclose(got.turned, expected.turned, atol=1e-12)


@given(sizes, st.floats(0.05, 20), st.integers(0, 999))
def test_the_m_step_never_raises_the_soft_objective(
    size: tuple[int, int, int], temperature: float, seed: int
) -> None:
    _, pairs, rest = size
    points, stage = normal(60, 2 * pairs + rest, seed=seed), a_stage(*size, seed=seed)
    w = soft(points, stage, temperature)
    better = maximised(sums_of(points, w), stage)
    before, after = (w * distances(points, s) for s in (stage, better))
    assert after.sum() <= before.sum() * (1 + 1e-12)
    assert not better.turning[0].any()
    assert not better.still[:, 0].any()


def test_the_m_step_is_the_least_squares_solution() -> None:
    entries, pairs, rest = 5, 3, 2
    points, stage = normal(400, 2 * pairs + rest), a_stage(entries, pairs, rest)
    w = soft(points, stage, 4.0)
    got = maximised(sums_of(points, w), stage)
    # One row a point and centre, weighted; one column a free entry.
    root = np.sqrt(w).reshape(-1, 1)
    a, b = np.meshgrid(np.arange(entries), np.arange(entries), indexing="ij")
    pick_a = np.eye(entries)[a.reshape(-1)][:, 1:]
    pick_b = np.eye(entries)[b.reshape(-1)][:, 1:]
    target = np.repeat(points, entries**2, axis=0)
    design = np.tile(pick_a + 1j * pick_b, (len(points), 1)) * root
    pair_target = (target[:, :pairs] + 1j * target[:, pairs : 2 * pairs]) * root
    expected = np.linalg.lstsq(design, pair_target, rcond=None)[0]
    np.testing.assert_allclose(got.turning[1:], expected, atol=1e-5)
    both = np.tile(np.concatenate([pick_a, pick_b], axis=1), (len(points), 1)) * root
    expected = np.linalg.lstsq(both, target[:, 2 * pairs :] * root, rcond=None)[0]
    np.testing.assert_allclose(
        got.still[:, 1:], expected.reshape(2, entries - 1, rest).real, atol=1e-5
    )


@given(sizes, st.integers(0, 999))
def test_nearest_centres_are_by_brute_force(size: tuple[int, int, int], seed: int) -> None:
    points, stage = normal(150, 2 * size[1] + size[2], seed=seed), a_stage(*size, seed=seed)
    a, b = nearest_centres(points, stage)
    d = distances(points, stage)
    np.testing.assert_allclose(d[np.arange(150), a, b], d.min((1, 2)), rtol=1e-4, atol=1e-4)


def tables(**options: object) -> CommutingTables:
    pairs = normal(2, 600, 8) + 1j * normal(2, 600, 8, seed=1)
    settings = {"stages": 3, "entries": 8, "seed": 0, "rounds": 5, **options}
    return fit_commuting(pairs, normal(2, 600, 3, seed=2), **settings)  # type: ignore[arg-type]


def test_every_stage_lowers_the_error_it_reports() -> None:
    fit = tables()
    assert fit.turning.shape == (2, 3, 8, 2, 8)
    assert fit.still.shape == (2, 3, 2, 8, 3)
    assert fit.error.shape == (4, 2)
    assert fit.turning.dtype == fit.still.dtype == np.float32
    assert not fit.turning[:, :, 0].any()
    assert not fit.still[:, :, :, 0].any()
    assert (np.diff(fit.error, axis=0) < 0).all()
    for head in range(2):
        x = normal(2, 600, 8)[head] + 1j * normal(2, 600, 8, seed=1)[head]
        left = np.concatenate([x.real, x.imag, normal(2, 600, 3, seed=2)[head]], axis=1)
        for place in range(3):
            parts = fit.turning[head, place].astype(np.float64)
            stage = Stage(parts[:, 0] + 1j * parts[:, 1], fit.still[head, place].astype(np.float64))
            a, b = nearest_centres(left, stage)
            left = left - centres(stage)[a, b]
            assert np.square(left).sum(-1).mean() == pytest.approx(
                fit.error[place + 1, head], rel=1e-4
            )


def test_soft_rounds_beat_hard_ones_alone() -> None:
    pairs = normal(2000, 16) + 1j * normal(2000, 16, seed=1)
    options = {"stages": 1, "entries": 16, "seed": 0}
    hard = fit_commuting(pairs, rounds=0, hard_rounds=12, **options)  # type: ignore[arg-type]
    mixed = fit_commuting(pairs, rounds=10, hard_rounds=2, **options)  # type: ignore[arg-type]
    assert mixed.error[-1] < hard.error[-1]


def test_clusters_of_the_right_form_are_found() -> None:
    stage = a_stage(4, 6, 2, seed=3)
    index = np.random.default_rng(0).integers(0, 16, 3000)
    points = centres(stage).reshape(16, -1)[index] + 0.02 * normal(3000, 14)
    fit = fit_commuting(
        points[:, :6] + 1j * points[:, 6:12], points[:, 12:], stages=1, entries=4, seed=2, rounds=30
    )
    assert fit.error[1] < 0.15 * fit.error[0]


def test_the_same_seed_gives_the_same_bytes_and_heads_are_fitted_apart() -> None:
    one, two, other = tables(), tables(), tables(seed=1)
    assert one.turning.tobytes() == two.turning.tobytes()
    assert one.turning.tobytes() != other.turning.tobytes()
    pairs = normal(2, 600, 8) + 1j * normal(2, 600, 8, seed=1)
    alone = fit_commuting(
        pairs[1], normal(2, 600, 3, seed=2)[1], stages=3, entries=8, seed=0, rounds=5
    )
    np.testing.assert_array_equal(alone.turning, one.turning[1])
    np.testing.assert_array_equal(alone.error, one.error[:, 1])


@pytest.mark.parametrize("points", [np.zeros((9, 2)), np.ones((9, 2)), np.eye(9)[:, :2] * 1e4])
def test_degenerate_points_give_finite_tables(points: np.ndarray) -> None:
    fit = fit_commuting(points + 0j, stages=2, entries=4, seed=0)
    assert np.isfinite(fit.turning).all()
    assert (np.diff(fit.error) <= 0).all()


def test_illegal_points_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 entries need as many points \(got 4\)"):
        fit_commuting(np.ones((4, 2)) + 0j, stages=1, entries=8, seed=0)
    with pytest.raises(ConfigError, match="points must be finite"):
        fit_commuting(np.full((9, 2), np.inf) + 0j, stages=1, entries=8, seed=0)


def coded(points: np.ndarray, fit: CommutingTables, stages: int) -> np.ndarray:
    """What is left of points ``(n, 2 P)`` after the first stages of one problem."""
    left = points
    for parts, still in zip(fit.turning[:stages], fit.still[:stages], strict=True):
        turning = parts[:, 0].astype(np.float64) + 1j * parts[:, 1]
        stage = Stage(turning, still.astype(np.float64))
        a, b = nearest_centres(left, stage)
        left = left - centres(stage)[a, b]
    return left


def test_points_held_out_keep_few_points_from_deceiving() -> None:
    # Noise, of which 200 points teach nothing but how long a centre should be.
    x, unseen = normal(200, 64), normal(300, 64, seed=5)
    pairs = x[:, :32] + 1j * x[:, 32:]
    options = {"stages": 12, "entries": 32, "seed": 0, "rounds": 4, "hard_rounds": 0}
    plain = fit_commuting(pairs, **options)  # type: ignore[arg-type]
    careful = fit_commuting(pairs, held_out=8, **options)  # type: ignore[arg-type]
    left = [np.square(coded(unseen, careful, r)).mean() for r in range(13)]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 0.85 * np.square(coded(unseen, plain, 12)).mean()
    # What the fit says of itself is nearer the truth.
    assert careful.error[-1] > 2 * plain.error[-1]


def test_points_held_out_decide_the_length_alone() -> None:
    x = normal(200, 16)
    other = x.copy()
    other[7::8] *= 1.3
    options = {"stages": 1, "entries": 16, "seed": 0, "rounds": 3, "held_out": 8}
    one, two = (
        fit_commuting(p[:, :8] + 1j * p[:, 8:], **options).turning  # type: ignore[arg-type]
        for p in (x, other)
    )
    factor = np.abs(two).max() / np.abs(one).max()
    assert abs(factor - 1) > 1e-3
    np.testing.assert_allclose(two, factor * one, atol=1e-5)


def test_points_held_out_do_not_count_as_points() -> None:
    pairs = normal(70, 4) + 1j * normal(70, 4, seed=1)
    assert fit_commuting(pairs, stages=1, seed=0).turning.shape == (1, 64, 2, 4)
    with pytest.raises(ConfigError, match=r"64 entries need as many points \(got 62\)"):
        fit_commuting(pairs, stages=1, seed=0, held_out=8)
