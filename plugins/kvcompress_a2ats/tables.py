"""What a calibration gives a2ats: the queries' metric, and codebooks that are best under it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcompress.calibrate import LayerMoments, LayerSamples
from kvcompress.fit.kmeans import kmeans
from kvcompress.layers import LayerSpec
from kvcompress.stages.whiten import block_metric, rotated_moment

Float64 = NDArray[np.float64]

DISTANCES: Final = tuple(int(d) for d in np.unique(np.geomspace(64, 8192, 64).astype(int)))
"""Distances over which queries are averaged: alike for every form of rope, so codes are too."""


def metric_of(layer: LayerSpec, moments: LayerMoments, size: int) -> Float64:
    """``H = E[q^T q]`` of the queries as far keys meet them, in blocks: ``(H, D / s, s, s)``."""
    moment: NDArray[Any] = moments.query_moment
    if layer.rotary is not None:
        moment = rotated_moment(moment, layer.rotary, DISTANCES)
    return block_metric(moment, size)


def fit_books(
    samples: LayerSamples, *, size: int, entries: int, query_aware: bool, seed: int
) -> dict[str, NDArray[Any]]:
    """Codebooks ``(H, D / s, entries, s)`` float16 of a layer's centred keys and values.

    Keys are clustered after ``z = k L`` with ``H = L L^T`` and turned back (Eq. 15 to 18).
    """
    moments = samples.moments
    keys = _cut(samples.keys - moments.key_mean, size)
    values = _cut(samples.values - moments.value_mean, size)
    if query_aware:
        factor = np.linalg.cholesky(metric_of(samples.layer, moments, size))
        keys = keys @ factor
    key_books = kmeans(keys, entries, seed=seed)
    value_books = kmeans(values, entries, seed=seed + 1)
    books = key_books.centroids.astype(np.float64)
    if query_aware:
        books = books @ np.linalg.inv(factor)
    return {
        "keys": books.astype(np.float16),
        "values": value_books.centroids.astype(np.float16),
        "report.dead_centroids": np.array(key_books.dead.sum() + value_books.dead.sum()),
    }


def _cut(rows: NDArray[np.float32], size: int) -> Float64:
    """``(N, H, D)`` to sub-vectors ``(H, D / s, N, s)``."""
    N, H, D = rows.shape
    return rows.astype(np.float64).reshape(N, H, D // size, size).transpose(1, 2, 0, 3)
