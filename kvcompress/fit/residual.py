"""Additive codebooks, each fitted to what the ones before it leave (Gersho and Gray, 1992)."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.fit.kmeans import kmeans, nearest


@frozen(eq=False)
class ResidualBooks:
    """Codebooks of ``R`` stages.

    Attributes:
        codebooks: ``(R, ..., K, s)`` float32; from the second on, entry 0 is zero, so that a
            stage never adds to an error.
        error: ``(R + 1, ...)`` mean squared length before and after each stage.
    """

    codebooks: NDArray[np.float32]
    error: NDArray[np.float64]


def fit_residual(
    points: NDArray[np.floating], clusters: int, stages: int, *, seed: int, rounds: int = 25
) -> ResidualBooks:
    """Fit codebooks by k-means, stage by stage.

    Args:
        points: ``(..., N, s)`` finite floats; each ``(N, s)`` is a problem by itself.
        clusters: Entries of a codebook, ``K``, at least 2.
        stages: Codebooks, ``R``, at least 1.
        seed: As for :func:`kvcompress.fit.kmeans.kmeans`.
        rounds: Rounds of k-means a stage.

    Raises:
        ConfigError: A number is out of range, or points are empty or not finite.
    """
    if stages < 1 or clusters < 2:
        raise ConfigError(
            f"fit_residual: stages must be at least 1 and clusters at least 2 "
            f"(got {stages}, {clusters})"
        )
    residual = points.astype(np.float64)
    books, error = [], [_mean_length(residual)]
    for stage in range(stages):
        zero = np.zeros((*points.shape[:-2], min(stage, 1), points.shape[-1]), np.float32)
        fitted = kmeans(residual, clusters - zero.shape[-2], seed=seed + stage, rounds=rounds)
        book = np.concatenate([zero, fitted.centroids], axis=-2)
        labels = nearest(residual, book)[..., None]
        residual = residual - np.take_along_axis(book, labels, axis=-2)
        books.append(book)
        error.append(_mean_length(residual))
    return ResidualBooks(np.stack(books), np.stack(error))


def _mean_length(points: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.square(points).sum(axis=-1).mean(axis=-1))
