from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.fit import kmeans as module
from kvcompress.fit.kmeans import kmeans, nearest


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def squared_distances(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    difference = points[..., :, None, :].astype(np.float64) - centroids[..., None, :, :]
    return np.asarray(np.square(difference).sum(-1))


@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.sampled_from([1, 2, 8, 16]),
    st.floats(-20, 20),
    st.integers(0, 999),
)
def test_the_objective_never_rises_and_is_what_it_says(
    count: int, size: int, clusters: int, exponent: float, seed: int
) -> None:
    points = gaussian(count, size, seed=seed) * np.float32(2.0**exponent)
    fit = kmeans(points, clusters, seed=seed, rounds=6)
    assert fit.centroids.shape == (clusters, size)
    assert fit.objective.shape == (7,)
    assert (np.diff(fit.objective) <= 0).all()
    distances = squared_distances(points, fit.centroids)
    floor = 1e-12 * float(np.square(points.astype(np.float64)).max())
    assert fit.objective[-1] == pytest.approx(distances.min(-1).mean(), rel=1e-4, abs=floor)
    assert fit.dead == clusters - len(np.unique(nearest(points, fit.centroids)))


def test_centroids_are_the_means_of_their_points() -> None:
    points = gaussian(500, 3)
    weights = np.random.default_rng(1).uniform(0, 4, 500)
    fit = kmeans(points, 8, seed=0, rounds=200, tolerance=0.0, weights=weights)
    labels = nearest(points, fit.centroids)
    for k in range(8):
        mean = np.average(points[labels == k], axis=0, weights=weights[labels == k])
        np.testing.assert_allclose(fit.centroids[k], mean, atol=1e-5)


def test_points_without_weight_count_for_nothing() -> None:
    points = gaussian(300, 4)
    weights = np.repeat([1.0, 0.0], [200, 100])
    # The largest entry sets the grid: keep it among the points that count.
    beside = kmeans(np.clip(points, -2, 2), 16, seed=3, weights=weights)
    alone = kmeans(np.clip(points[:200], -2, 2), 16, seed=3)
    np.testing.assert_array_equal(beside.centroids, alone.centroids)


@given(st.integers(1, 12), st.integers(1, 20), st.integers(0, 99))
def test_few_distinct_points_are_met_exactly(distinct: int, clusters: int, seed: int) -> None:
    points = np.tile(gaussian(distinct, 3, seed=seed), (5, 1))
    fit = kmeans(points, clusters, seed=seed)
    if clusters >= distinct:
        assert fit.objective[-1] == pytest.approx(0, abs=1e-12)
        assert fit.dead == clusters - distinct
    else:
        assert fit.dead == 0


def test_centroids_that_serve_nothing_are_put_to_use() -> None:
    points = gaussian(400, 2)
    grid = np.rint(points.astype(np.float64) * 2**20)
    labels, distances = np.zeros(400, dtype=np.intp), np.square(grid).sum(1)
    centroids = np.zeros((4, 2))
    module._revive(centroids, grid, np.ones(400), labels, distances)
    worst = np.argsort(-distances)[:3]
    np.testing.assert_array_equal(centroids, np.concatenate([[[0, 0]], grid[worst]]))
    # And no fit of Gaussian points ends with one.
    assert kmeans(gaussian(30, 4000, 4), 256, seed=0, rounds=2).dead.sum() == 0


def test_problems_are_fitted_apart() -> None:
    points = gaussian(2, 3, 200, 4)
    together = kmeans(points, 16, seed=5)
    assert together.centroids.shape == (2, 3, 16, 4)
    assert together.objective.shape == (26, 2, 3)
    for place in np.ndindex(2, 3):
        alone = kmeans(points[place], 16, seed=5)
        np.testing.assert_array_equal(together.centroids[place], alone.centroids)
        np.testing.assert_array_equal(together.objective[:, *place], alone.objective)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_distances_are_exact_whatever_the_chunks(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = gaussian(700, size)
    expected = kmeans(points, 64, seed=0, rounds=5).centroids
    for chunk in (1, 8 * 64 * 13, 1 << 30):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
        np.testing.assert_array_equal(kmeans(points, 64, seed=0, rounds=5).centroids, expected)


def test_a_power_of_two_scales_the_centroids_and_nothing_else() -> None:
    points = gaussian(300, 5)
    once, scaled = kmeans(points, 16, seed=0), kmeans(points * np.float32(2.0**40), 16, seed=0)
    np.testing.assert_array_equal(scaled.centroids, once.centroids * np.float32(2.0**40))


def test_bytes_are_the_same_in_any_process_with_any_number_of_threads() -> None:
    script = (
        "import hashlib, numpy as np\n"
        "from kvcompress.fit.kmeans import kmeans\n"
        "x = np.random.default_rng(0).standard_normal((2, 3000, 16)).astype(np.float32)\n"
        "print(hashlib.sha256(kmeans(x, 256, seed=7, rounds=4).centroids.tobytes()).hexdigest())"
    )
    x = gaussian(2, 3000, 16)
    here = hashlib.sha256(kmeans(x, 256, seed=7, rounds=4).centroids.tobytes()).hexdigest()
    for threads in ("1", "2"):
        env = {"OPENBLAS_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        out = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == here
    assert hashlib.sha256(kmeans(x, 256, seed=8, rounds=4).centroids.tobytes()).hexdigest() != here


def test_more_centroids_and_rounds_serve_better() -> None:
    points = gaussian(2000, 4)
    ends = [kmeans(points, 2**bits, seed=0).objective[-1] for bits in range(1, 8)]
    assert (np.diff(ends) < 0).all()
    start = kmeans(points, 64, seed=0, rounds=0)
    assert start.objective.shape == (1,)
    assert kmeans(points, 64, seed=0).objective[-1] < 0.8 * start.objective[0]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9), st.integers(0, 999))
def test_nearest_is_by_brute_force(count: int, size: int, clusters: int, seed: int) -> None:
    points, centroids = gaussian(2, count, size, seed=seed), gaussian(2, clusters, size, seed=seed)
    expected = squared_distances(points, centroids).argmin(-1)
    np.testing.assert_array_equal(nearest(points, centroids), expected)


def test_a_tie_goes_to_the_lower_centroid() -> None:
    points = np.array([[0.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    centroids = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert nearest(points, centroids).tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        (np.zeros((0, 4)), {}, "points must be"),
        (np.zeros(4), {}, "points must be"),
        (np.array([[1.0, np.nan]]), {}, "points must be finite"),
        (np.ones((4, 2)), {"clusters": 0}, "clusters must be positive"),
        (np.ones((4, 2)), {"rounds": -1}, r"rounds not negative \(got 2, -1\)"),
        (np.ones((4, 2)), {"weights": np.array([1.0, -1.0, 1.0, 1.0])}, "weights must be"),
        (np.ones((4, 2)), {"weights": np.zeros(4)}, "not all zero"),
    ],
)
def test_illegal_arguments_are_refused(
    points: np.ndarray, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kmeans(points, **{"clusters": 2, "seed": 0, **options})  # type: ignore[arg-type]
