"""What a calibration gives a2ats: maps that whiten by the queries, and codebooks after them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcompress.calibrate import LayerMoments, LayerSamples
from kvcompress.fit.balance import balanced_rotation
from kvcompress.fit.product import Books, fit_product
from kvcompress.layers import LayerSpec
from kvcompress.stages.whiten import block_metric, rotated_moment

Float64 = NDArray[np.float64]

DISTANCES: Final = tuple(int(d) for d in np.unique(np.geomspace(64, 8192, 64).astype(int)))
"""Distances over which queries are averaged: alike for every form of rope, so codes are too."""

RIDGE: Final = 0.1
"""Variance added to the queries', in parts of the mean: they are those of one text."""

ROUNDS: Final = 12  # of k-means; more lowers no error on other text
POINTS: Final = 32768  # sub-vectors that a codebook is fitted to at most


def query_moment(layer: LayerSpec, moments: LayerMoments) -> NDArray[np.floating[Any]]:
    """``H = E[q^T q]`` of the queries as far keys meet them, ``(H, D, D)``."""
    if layer.rotary is None:
        return moments.query_moment
    return rotated_moment(moments.query_moment, layer.rotary, DISTANCES)


def own_metric(whole: NDArray[np.floating[Any]], size: int) -> Float64:
    """What squared lengths before a map are after it, sub-vector by sub-vector.

    Args:
        whole: ``A``, ``(H, D, D)``: an error ``e`` after it is ``e A^-1`` before.
        size: Channels of a sub-vector, ``s``.

    Returns:
        The diagonal blocks of ``(A^T A)^-1``, ``(H, D / s, s, s)``.
    """
    wide = whole.astype(np.float64)
    return block_metric(np.linalg.inv(wide.swapaxes(1, 2) @ wide), size)


def fit_tables(
    samples: LayerSamples,
    moment: NDArray[np.floating[Any]] | None,
    *,
    size: int,
    entries: int,
    books: Books,
    seed: int,
) -> dict[str, Any]:
    """Maps ``(H, D, D)`` and codebooks ``(H or 1, D / s or 1, entries, s)``, all float16.

    Keys are clustered after ``z = k L R``: ``L`` makes least squares the error of scores (Eq. 15 to
    17), the rotation ``R`` deals out the variance to the sub-vectors. Values have the rotation
    alone.

    Args:
        samples: The layer's.
        moment: ``H`` as ``(heads or 1, D, D)``, or ``None`` for least squares of the keys.
        size: Channels of a sub-vector, ``s``.
        entries: Entries of a codebook.
        books: What shares a codebook.
        seed: Of the fits.
    """
    moments = samples.moments
    keys = (samples.keys - moments.key_mean).swapaxes(0, 1).astype(np.float64)
    values = (samples.values - moments.value_mean).swapaxes(0, 1).astype(np.float64)
    factor = None
    if moment is not None:
        factor = np.linalg.cholesky(block_metric(moment, keys.shape[-1], RIDGE)[:, 0])
    fitted: dict[str, Any] = {}
    dead = 0
    for place, (part, rows, before) in enumerate([("key", keys, factor), ("value", values, None)]):
        turned = rows if before is None else rows @ before
        rotation = balanced_rotation(turned.swapaxes(1, 2) @ turned / turned.shape[1], size)
        whole = (rotation if before is None else before @ rotation).astype(np.float16)
        found = fit_product(
            rows @ whole.astype(np.float64),
            size,
            entries,
            books=books,
            points=POINTS,
            rounds=ROUNDS,
            seed=seed + place,
        )
        fitted |= {f"{part}_map": whole, f"{part}_books": found.codebook}
        fitted[f"report.{part}_left"] = found.left
        dead += found.dead
    return {**fitted, "report.dead_centroids": dead}
