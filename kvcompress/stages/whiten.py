"""Whitening by the queries: the plain nearest code becomes the one that errs least in the score.

The expected squared error of a score is ``e H e^T`` for an error ``e`` of the key and
``H = E[q^T q]``. With ``H = L L^T`` it is ``|e L|^2``: code ``k L`` by least squares (A2ATS,
arXiv 2502.12665, Eq. 14 to 18).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.layers import Rotary

_JITTER = 1e-6  # of the mean variance, added to every channel's


def block_metric(moment: NDArray[np.floating[Any]], size: int) -> NDArray[np.float64]:
    """The diagonal blocks of second moments, scaled to a mean variance of 1 and made definite.

    A moment in proportion to the identity gives the identity exactly.

    Args:
        moment: ``(H, D, D)`` symmetric, of the queries of each KV head's group.
        size: Channels of a block, ``s``, a divisor of ``D``; ``D`` for the whole matrix.

    Returns:
        ``(H, D / s, s, s)`` float64, fit to be the metric of a ``ProductVQ``.

    Raises:
        ConfigError: A shape does not fit, or a moment is no second moment.
    """
    H, D = moment.shape[0], moment.shape[-1]
    if moment.ndim != 3 or moment.shape[1] != D or size < 1 or D % size:
        raise ConfigError(
            f"whiten: moments must be (heads, channels, channels) with channels divisible by the "
            f"block size {size} (got {moment.shape})"
        )
    scale = np.einsum("hii->h", moment.astype(np.float64)) / D
    if not np.isfinite(moment).all() or not (scale > 0).all():
        raise ConfigError("whiten: moments must be finite with a positive trace")
    cut = moment.astype(np.float64).reshape(H, D // size, size, D // size, size)
    blocks = np.einsum("hiaib->hiab", cut) / scale[:, None, None, None]
    blocks = (blocks + blocks.swapaxes(-1, -2)) / 2
    metric = (blocks + _JITTER * np.eye(size)) / (1.0 + _JITTER)
    if not (np.linalg.eigvalsh(metric) > 0).all():
        raise ConfigError("whiten: moments must not have negative directions")
    return np.asarray(metric)


def _paired(x: Any, rotating: int) -> Any:
    """Put the two channels of each pair together, where they are half the rotation apart."""
    lib = np if isinstance(x, np.ndarray) else mx
    halves = x[..., :rotating].reshape(*x.shape[:-1], 2, rotating // 2)
    joined = halves.swapaxes(-1, -2).reshape(*x.shape[:-1], rotating)
    return lib.concatenate([joined, x[..., rotating:]], axis=-1)


def _parted(x: mx.array, rotating: int) -> mx.array:
    """Undo :func:`_paired`."""
    pairs = x[..., :rotating].reshape(*x.shape[:-1], rotating // 2, 2)
    joined = pairs.swapaxes(-1, -2).reshape(*x.shape[:-1], rotating)
    return mx.concatenate([joined, x[..., rotating:]], axis=-1)


@frozen(eq=False)
class Whiten:
    """``z = x L``, block by block; queries take ``L^-T``.

    Attributes:
        factor: ``(H, D / s, s, s)`` float32, ``L``.
        back: ``(H, D / s, s, s)`` float32, ``L^-1``.
        halves: Channels whose first and second half make pairs, the blocks then; 0 where blocks
            are of neighbouring channels.
    """

    factor: mx.array
    back: mx.array
    halves: int = 0

    @classmethod
    def by_blocks(cls, moment: NDArray[np.floating[Any]], size: int) -> Whiten:
        """From second moments ``(H, D, D)``, in blocks of ``size`` neighbouring channels.

        Raises:
            ConfigError: As :func:`block_metric`.
        """
        return cls._of(block_metric(moment, size), 0)

    @classmethod
    def by_pairs(cls, moment: NDArray[np.floating[Any]], rotary: Rotary) -> Whiten:
        """From second moments ``(H, D, D)``, each rotary pair by itself.

        Channels that do not rotate are taken in neighbouring pairs.

        Raises:
            ConfigError: As :func:`block_metric`.
        """
        halves = 0 if rotary.traditional else rotary.dims
        if halves:
            order = _paired(np.arange(moment.shape[-1]), halves)
            moment = moment[:, order][:, :, order]
        return cls._of(block_metric(moment, 2), halves)

    @classmethod
    def _of(cls, blocks: NDArray[np.float64], halves: int) -> Whiten:
        factor = np.linalg.cholesky(blocks)
        tables = [mx.array(t.astype(np.float32)) for t in (factor, np.linalg.inv(factor))]
        mx.eval(tables)
        return cls(tables[0], tables[1], halves)

    @property
    def dim(self) -> int:
        """Channels, ``D``."""
        return int(self.factor.shape[1] * self.factor.shape[2])

    @property
    def table_bytes(self) -> int:
        """Bytes of both factors."""
        return int(self.factor.nbytes + self.back.nbytes)

    def forward(self, x: mx.array) -> mx.array:
        """``x L`` for ``(B, H, T, D)`` float32."""
        return self._apply(x, self.factor)

    def inverse(self, z: mx.array) -> mx.array:
        """``z L^-1``."""
        return self._apply(z, self.back)

    def query(self, q: mx.array) -> mx.array:
        """``q L^-T``."""
        return self._apply(q, self.back.swapaxes(-1, -2))

    def _apply(self, x: mx.array, blocks: mx.array) -> mx.array:
        B, H, T, D = x.shape
        if self.halves:
            x = _paired(x, self.halves)
        cut = x.reshape(B, H, T, -1, blocks.shape[-1]).swapaxes(2, 3)
        out = (cut @ blocks).swapaxes(2, 3).reshape(B, H, T, D)
        return _parted(out, self.halves) if self.halves else out
