"""Codebooks of a product quantiser: of a whole layer, of a head, or of a head's sub-space.

Entry 0 is zero: whatever comes, a code is never further off than none. Tokens that models pay
much attention to for want of better ones have values near zero, and must keep them.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.fit.kmeans import kmeans

Books = Literal["layer", "head", "sub-space"]


@frozen(eq=False)
class ProductBooks:
    """Codebooks, and how well they fit.

    Attributes:
        codebook: ``(H or 1, D / s or 1, K, s)`` float16, as a ``ProductVQ`` takes it.
        left: Share of the energy of what was fitted to that is left after coding it by the
            entries but the first.
        dead: Entries but the first that serve no sub-vector.
    """

    codebook: NDArray[np.float16]
    left: float
    dead: int


def fit_product(
    rows: NDArray[np.floating[Any]],
    sub_dim: int,
    entries: int,
    *,
    books: Books,
    points: int,
    rounds: int,
    seed: int,
) -> ProductBooks:
    """Fit codebooks to sub-vectors by k-means.

    Args:
        rows: ``(H, N, D)`` finite floats.
        sub_dim: Channels of a sub-vector, ``s``, a divisor of ``D``.
        entries: Entries of a codebook, ``K``, at least 2.
        books: What shares a codebook: all sub-vectors of the layer, those of a head, or those
            at the same channels of a head.
        points: Sub-vectors that a codebook is fitted to at most, spread evenly over its heads,
            sub-spaces and tokens.
        rounds: Rounds of k-means.
        seed: As for :func:`kvcompress.fit.kmeans.kmeans`.

    Raises:
        ConfigError: ``D`` is not divisible, or rows are empty or not finite.
    """
    H, N, D = rows.shape
    if sub_dim < 1 or D % sub_dim:
        raise ConfigError(f"fit_product: {D} channels are not divisible by sub_dim {sub_dim}")
    cut = rows.reshape(H, N, D // sub_dim, sub_dim).swapaxes(1, 2)
    if books == "layer":
        cut = cut.reshape(1, 1, -1, sub_dim)
    elif books == "head":
        cut = cut.reshape(H, 1, -1, sub_dim)
    count = cut.shape[2]
    if count > points:
        cut = cut[:, :, np.arange(points) * count // points]
    found = kmeans(cut, entries - 1, seed=seed, rounds=rounds)
    zero = np.zeros((*cut.shape[:2], 1, sub_dim), dtype=np.float32)
    codebook = np.concatenate([zero, found.centroids], axis=2).astype(np.float16)
    energy = np.square(cut, dtype=np.float64).sum(axis=-1).mean(axis=-1).sum()
    left = float(found.objective[-1].sum() / energy) if energy else 0.0
    return ProductBooks(codebook, left, int(found.dead.sum()))
