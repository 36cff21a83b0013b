"""Running sums of a stream of vectors, in float64, whatever pieces they come in."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


@define(eq=False)
class ChannelSums:
    """Count, sum, sum of squares and largest magnitude of every channel of every head.

    Attributes:
        shape: ``(H, D)``.
        count: Vectors a head so far.
    """

    shape: tuple[int, int]
    count: int = 0
    _total: Array = field(init=False)
    _squares: Array = field(init=False)
    _largest: Array = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._total = np.zeros(self.shape)
        self._squares = np.zeros(self.shape)
        self._largest = np.zeros(self.shape)

    def add(self, x: Array) -> None:
        """Take in ``(H, L, D)``."""
        wide = x.astype(np.float64)
        self.count += x.shape[1]
        self._total += wide.sum(axis=1)
        self._squares += np.square(wide).sum(axis=1)
        np.maximum(self._largest, np.abs(wide).max(axis=1, initial=0.0), out=self._largest)

    @property
    def mean(self) -> NDArray[np.float32]:
        """``(H, D)``; zeros before the first vector."""
        return (self._total / max(self.count, 1)).astype(np.float32)

    @property
    def variance(self) -> NDArray[np.float32]:
        """``(H, D)`` about the mean, over all vectors."""
        count = max(self.count, 1)
        with np.errstate(invalid="ignore"):  # infinite channels have no variance
            spread = self._squares / count - np.square(self._total / count)
        return np.maximum(spread, 0.0).astype(np.float32)

    @property
    def largest(self) -> NDArray[np.float32]:
        """``(H, D)`` magnitudes."""
        return self._largest.astype(np.float32)


@define(eq=False)
class SecondMoment:
    """The mean outer product of every head's vectors.

    Attributes:
        shape: ``(H, D)``.
        count: Vectors a head so far.
    """

    shape: tuple[int, int]
    count: int = 0
    _total: Array = field(init=False)

    def __attrs_post_init__(self) -> None:
        H, D = self.shape
        self._total = np.zeros((H, D, D))

    def add(self, x: Array) -> None:
        """Take in ``(H, L, D)``."""
        wide = x.astype(np.float64)
        self.count += x.shape[1]
        self._total += wide.swapaxes(1, 2) @ wide

    @property
    def moment(self) -> NDArray[np.float32]:
        """``(H, D, D)``, exactly symmetric; the identity before the first vector."""
        if not self.count:
            H, D = self.shape
            return np.broadcast_to(np.eye(D, dtype=np.float32), (H, D, D)).copy()
        mean = self._total / self.count
        return ((mean + mean.swapaxes(1, 2)) / 2).astype(np.float32)
