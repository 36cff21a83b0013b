"""Rotations that make the sub-vectors of a product code equally hard to code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcompress.errors import ConfigError

Float64 = NDArray[np.float64]

_LEAST = 1e-12  # of the largest variance: what a direction without any counts as


def balanced_rotation(covariance: NDArray[np.floating[Any]], size: int) -> Float64:
    """Principal directions, dealt out so that each sub-vector gets large and small ones alike.

    At equal bits a sub-vector of independent Gaussians errs in proportion to the geometric mean of
    their variances; the sum over sub-vectors is least where these are equal. The directions go, the
    largest variance first, to the sub-vector with the least product so far that has room
    (parametric optimised product quantisation; Ge, He, Ke and Sun, 2013, section 3.3).

    Args:
        covariance: ``(H, D, D)`` symmetric, of what is to be coded.
        size: Channels of a sub-vector, ``s``, a divisor of ``D``.

    Returns:
        ``(H, D, D)`` orthonormal: ``x @ rotation`` is cut into neighbouring sub-vectors.

    Raises:
        ConfigError: A shape does not fit, or something is not finite.
    """
    if covariance.ndim != 3 or covariance.shape[1] != covariance.shape[2]:
        raise ConfigError(
            f"balanced_rotation: covariance must be (heads, channels, channels) "
            f"(got {covariance.shape})"
        )
    D = covariance.shape[1]
    if size < 1 or D % size:
        raise ConfigError(f"balanced_rotation: {D} channels are not divisible by {size}")
    wide = covariance.astype(np.float64)
    if not np.isfinite(wide).all():
        raise ConfigError("balanced_rotation: covariance must be finite")
    variances, directions = np.linalg.eigh((wide + wide.swapaxes(1, 2)) / 2)
    return np.stack(
        [
            _signed(V[:, ::-1])[:, _deal(w[::-1], size)]
            for w, V in zip(variances, directions, strict=True)
        ]
    )


def _signed(directions: Float64) -> Float64:
    """With the largest entry of each direction positive: its sign is the library's whim."""
    largest = np.abs(directions).argmax(axis=0)
    signs = np.sign(directions[largest, np.arange(directions.shape[1])])
    return np.asarray(directions * signs)


def _deal(variances: Float64, size: int) -> list[int]:
    """The order in which directions, largest first, stand in their sub-vectors."""
    hands: list[list[int]] = [[] for _ in range(len(variances) // size)]
    products = np.zeros(len(hands))
    floor = max(float(variances[0]) * _LEAST, np.finfo(np.float64).tiny)
    logs = np.log(np.maximum(variances, floor))
    # Against the smallest, so that every direction adds to its sub-vector's product.
    for place, weight in enumerate(logs - logs[-1]):
        room = [i for i, hand in enumerate(hands) if len(hand) < size]
        hand = min(room, key=lambda i: products[i])
        hands[hand].append(place)
        products[hand] += weight
    return [place for hand in hands for place in hand]
