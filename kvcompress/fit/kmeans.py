"""k-means: codebooks of least squared error, the same bytes on every machine.

Points are put on a grid fine enough to lose nothing of float32, and so coarse that every product
and sum in a distance is an integer that float64 holds exactly. What a matrix product gives then
depends on neither the BLAS library nor its number of threads, and ties are true ties.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.stages.hashing import hashed

Float64 = NDArray[np.float64]
Rows = NDArray[np.intp]

_DRAWN_FROM = 8  # points for each first centroid that is drawn; more lower no error
_CHUNK_BYTES = 1 << 20  # of distances at a time: they fit a core's own cache


@frozen(eq=False)
class Clusters:
    """What k-means found.

    Attributes:
        centroids: ``(..., K, s)`` float32.
        objective: ``(rounds + 1, ...)`` float64, the mean squared distance of a point to its
            centroid before each round and after the last; it never rises. A problem that settled
            early repeats its last value.
        dead: ``(...)`` centroids that serve no point: 0 unless there are fewer distinct points.
    """

    centroids: NDArray[np.float32]
    objective: Float64
    dead: Rows


def kmeans(
    points: NDArray[np.floating],
    clusters: int,
    *,
    seed: int,
    rounds: int = 25,
    tolerance: float = 1e-3,
    weights: NDArray[np.floating] | None = None,
) -> Clusters:
    """Fit centroids by k-means++ (Arthur and Vassilvitskii, 2007) and Lloyd's rounds.

    A centroid that serves no point moves to a point that is served worst.

    Args:
        points: ``(..., N, s)`` finite floats; each ``(N, s)`` is a problem by itself.
        clusters: Centroids of each problem, ``K``.
        seed: Draws the first centroids, alike for all problems.
        rounds: Lloyd's rounds at most.
        tolerance: A problem settles when a round gains less than this part of the objective.
        weights: ``(..., N)`` non-negative, or one ``(N,)`` for all problems.

    Returns:
        The centroids and how they were reached.

    Raises:
        ConfigError: There is no point, or something is not finite or not positive.
    """
    if points.ndim < 2 or not points.size:
        raise ConfigError(f"kmeans: points must be (..., N, s), not empty (got {points.shape})")
    if clusters < 1 or rounds < 0:
        raise ConfigError(
            f"kmeans: clusters must be positive and rounds not negative (got {clusters}, {rounds})"
        )
    if not np.isfinite(points).all():
        raise ConfigError("kmeans: points must be finite")
    shape, (N, s) = points.shape[:-2], points.shape[-2:]
    masses = np.ones(N) if weights is None else np.asarray(weights, dtype=np.float64)
    if (masses < 0).any() or not np.isfinite(masses).all() or not (masses.sum(-1) > 0).all():
        raise ConfigError("kmeans: weights must be finite, not negative and not all zero")
    shares = np.broadcast_to(masses, (*shape, N)).reshape(-1, N)
    draws = (hashed(clusters, "kmeans", seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    fits = [
        _fit(one, share, draws, rounds, tolerance)
        for one, share in zip(points.reshape(-1, N, s), shares, strict=True)
    ]
    return Clusters(
        np.stack([fit[0] for fit in fits]).reshape(*shape, clusters, s),
        np.stack([fit[1] for fit in fits], axis=-1).reshape(-1, *shape),
        np.array([fit[2] for fit in fits], dtype=np.intp).reshape(shape),
    )


def nearest(points: NDArray[np.floating], centroids: NDArray[np.floating]) -> Rows:
    """The nearest centroid of every point, ties to the lower, by exact distances.

    Args:
        points: ``(..., N, s)``.
        centroids: ``(..., K, s)``, as many problems.

    Returns:
        ``(..., N)``.
    """
    found = np.empty(points.shape[:-1], dtype=np.intp)
    for place in np.ndindex(points.shape[:-2]):
        grid, _ = _on_grid(np.concatenate([points[place], centroids[place]]))
        count = points.shape[-2]
        found[place] = _assign(grid[:count], grid[count:])[0]
    return found


def _fit(
    points: NDArray[np.floating], weights: Float64, draws: Float64, rounds: int, tolerance: float
) -> tuple[NDArray[np.float32], Float64, int]:
    """One problem: centroids, objective and number of dead centroids."""
    grid, unit = _on_grid(points)
    centroids = _plus_plus(grid, weights, draws)
    history: list[float] = []
    labels, distances = _assign(grid, centroids)
    history.append(_total(weights * distances))
    for _ in range(rounds):
        moved = _means(grid, weights, labels, centroids)
        _revive(moved, grid, weights, labels, distances)
        tried_labels, tried = _assign(grid, moved)
        objective = _total(weights * tried)
        if objective >= history[-1]:
            break
        gained = history[-1] - objective
        centroids, labels, distances = moved, tried_labels, tried
        history.append(objective)
        if gained < tolerance * history[-2]:
            break
    history += history[-1:] * (rounds + 1 - len(history))
    used = np.bincount(labels, minlength=len(centroids)) > 0
    mean = np.array(history) * (unit**2 / _total(weights))
    return (centroids * unit).astype(np.float32), mean, int((~used).sum())


def _on_grid(points: NDArray[np.floating]) -> tuple[Float64, float]:
    """Points as whole numbers of a unit that is a power of two."""
    size = points.shape[1]
    # A distance is at most 3 size 2**(2 bits), which must stay below 2**53.
    bits = min(24, (53 - (3 * size).bit_length()) // 2)
    largest = float(np.abs(points).max())
    unit = 2.0 ** (np.frexp(largest)[1] - bits) if largest else 1.0
    return np.rint(points.astype(np.float64) / unit), unit


def _total(terms: Float64) -> float:
    """The sum, added up in order: other orders differ between machines."""
    return float(np.cumsum(terms)[-1])


def _plus_plus(grid: Float64, weights: Float64, draws: Float64) -> Float64:
    """First centroids: each a point drawn in proportion to its squared distance to the others.

    Of many points that have any weight, from some that are spread evenly over them.
    """
    most, some = _DRAWN_FROM * len(draws), np.flatnonzero(weights)
    if len(some) > most:
        some = some[np.arange(most) * len(some) // most]
        grid, weights = grid[some], weights[some]
    squares = np.square(grid).sum(axis=1)
    nearest = np.ones(len(grid))
    chosen = np.zeros(len(draws), dtype=np.intp)
    for place, draw in enumerate(draws):
        mass = np.cumsum(weights * nearest)
        if mass[-1] == 0:
            break  # every point is a centroid already
        pick = min(int(np.searchsorted(mass, draw * mass[-1], side="right")), len(grid) - 1)
        distance = squares + squares[pick] - 2.0 * (grid @ grid[pick])
        nearest = np.minimum(nearest, distance) if place else distance
        chosen[place] = pick
    return grid[chosen]


def _assign(grid: Float64, centroids: Float64) -> tuple[Rows, Float64]:
    """The nearest centroid of every point, ties to the lower, and its squared distance."""
    count = len(centroids)
    table = np.concatenate([-2.0 * centroids.T, np.square(centroids).sum(axis=1)[None]])
    padded = np.concatenate([grid, np.ones((len(grid), 1))], axis=1)
    rows = max(1, _CHUNK_BYTES // (8 * count))
    labels = np.empty(len(grid), dtype=np.intp)
    distances = np.square(grid).sum(axis=1)
    room = np.empty((min(rows, len(grid)), count))  # new memory costs more than what fills it
    for start in range(0, len(grid), rows):
        part = padded[start : start + rows]
        chunk = np.matmul(part, table, out=room[: len(part)])
        best = chunk.argmin(axis=1)
        labels[start : start + rows] = best
        distances[start : start + rows] += chunk[np.arange(len(best)), best]
    return labels, distances


def _means(grid: Float64, weights: Float64, labels: Rows, centroids: Float64) -> Float64:
    """The mean of each centroid's points, on the grid; one without points stays."""
    count = len(centroids)
    mass = np.bincount(labels, weights, count)
    sums = [np.bincount(labels, weights * channel, count) for channel in grid.T]
    means = np.rint(np.stack(sums, axis=1) / np.where(mass > 0, mass, 1.0)[:, None])
    return np.where(mass[:, None] > 0, means, centroids)


def _revive(
    centroids: Float64, grid: Float64, weights: Float64, labels: Rows, distances: Float64
) -> None:
    """Move centroids that serve no point, in place, to the points that are served worst."""
    dead = np.flatnonzero(np.bincount(labels, minlength=len(centroids)) == 0)
    if len(dead):
        cost = weights * distances
        worst = np.argsort(-cost, kind="stable")[: len(dead)]
        worst = worst[cost[worst] > 0]
        centroids[dead[: len(worst)]] = grid[worst]
