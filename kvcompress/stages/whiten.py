"""Whitening by the queries: the plain nearest code becomes the one that errs least in the score.

The expected squared error of a score is ``e H e^T`` for an error ``e`` of the key and
``H = E[q^T q]``. With ``H = L L^T`` it is ``|e L|^2``: code ``k L`` by least squares (A2ATS,
arXiv 2502.12665, Eq. 14 to 18).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.layers import Rotary
from kvcompress.stages.linear import Linear
from kvcompress.stages.pairs import join_pairs, split_pairs

Float64 = NDArray[np.float64]

_JITTER = 1e-6  # of the mean variance, added to every channel's


def block_metric(moment: NDArray[np.floating[Any]], size: int, ridge: float = _JITTER) -> Float64:
    """The diagonal blocks of second moments, scaled to a mean variance of 1 and made definite.

    A moment in proportion to the identity gives the identity exactly.

    Args:
        moment: ``(H, D, D)`` symmetric, of the queries of each KV head's group.
        size: Channels of a block, ``s``, a divisor of ``D``; ``D`` for the whole matrix.
        ridge: Variance added to every channel, as a part of the mean variance.

    Returns:
        ``(H, D / s, s, s)`` float64, fit to be the metric of a ``ProductVQ``.

    Raises:
        ConfigError: A shape does not fit, or a moment is no second moment.
    """
    scaled = _scaled(moment)
    H, D, _ = scaled.shape
    if size < 1 or D % size:
        raise ConfigError(f"whiten: {D} channels are not divisible by the block size {size}")
    cut = scaled.reshape(H, D // size, size, D // size, size)
    return _definite(np.einsum("hiaib->hiab", cut), ridge)


def rotated_moment(
    moment: NDArray[np.floating[Any]], rotary: Rotary, distances: Iterable[int]
) -> Float64:
    """Second moments of queries as un-rotated keys meet them, averaged over distances.

    A query at a distance of ``d`` tokens meets the key as ``q R_d`` (A2ATS, Eq. 12), so the moment
    that weighs the key's error is the mean of ``R_d^T H R_d``.

    Args:
        moment: ``(H, D, D)``, ``E[q^T q]`` before RoPE.
        rotary: The rotation of keys and queries.
        distances: The distances: one that stands for all, or a sample of what will occur.

    Returns:
        ``(H, D, D)`` float64.
    """
    first, second, _ = split_pairs(np.arange(moment.shape[-1]), rotary)
    out, count = np.zeros(moment.shape), 0
    for distance in distances:
        cosine, sine = np.cos(distance * rotary.angles), np.sin(distance * rotary.angles)
        turn = np.eye(moment.shape[-1])
        turn[first, first], turn[first, second] = cosine, sine
        turn[second, first], turn[second, second] = -sine, cosine
        out += turn.T @ moment.astype(np.float64) @ turn
        count += 1
    return np.asarray(out / max(count, 1))


def _scaled(moment: NDArray[np.floating[Any]]) -> Float64:
    """Symmetric, with a mean variance of 1."""
    if moment.ndim != 3 or moment.shape[1] != moment.shape[2] or not moment.size:
        raise ConfigError(
            f"whiten: moments must be (heads, channels, channels) (got {moment.shape})"
        )
    wide = moment.astype(np.float64)
    scale = np.einsum("hii->h", wide) / moment.shape[1]
    if not np.isfinite(wide).all() or not (scale > 0).all():
        raise ConfigError("whiten: moments must be finite with a positive trace")
    return np.asarray((wide + wide.swapaxes(1, 2)) / (2 * scale[:, None, None]))


def _definite(blocks: Float64, ridge: float = _JITTER) -> Float64:
    """With a little more variance in every channel, and as much less in all."""
    metric = (blocks + ridge * np.eye(blocks.shape[-1])) / (1.0 + ridge)
    if not (np.linalg.eigvalsh(metric) > 0).all():
        raise ConfigError("whiten: moments must not have negative directions")
    return np.asarray(metric)


def whitening(moment: NDArray[np.floating[Any]], size: int) -> Linear:
    """``z = x L`` in blocks of neighbouring channels.

    Where the blocks are the sub-vectors of a product code, a metric of the quantiser does the
    same and leaves nothing to undo: see :class:`kvcompress.stages.product_vq.ProductVQ`.

    Args:
        moment: ``(H, D, D)``, second moments of the queries.
        size: Channels of a block; ``D`` for the whole matrix.

    Raises:
        ConfigError: As :func:`block_metric`.
    """
    return Linear.of(np.linalg.cholesky(block_metric(moment, size)))


@frozen(eq=False)
class WhitenPairs:
    """``z = x L`` within each pair of channels that RoPE turns, channel by channel for the rest.

    Attributes:
        factor: ``(3, H, 1, P)`` float32, the three entries of each pair's ``L``, row by row.
        back: ``(3, H, 1, P)`` float32, those of ``L^-1``.
        rest: ``(H, 1, Q)`` float32, the factors of channels that do not rotate.
        rotary: Says which channels form a pair.
    """

    factor: mx.array
    back: mx.array
    rest: mx.array
    rotary: Rotary

    @classmethod
    def of(cls, moment: NDArray[np.floating[Any]], rotary: Rotary) -> WhitenPairs:
        """From second moments ``(H, D, D)``.

        Raises:
            ConfigError: As :func:`block_metric`.
        """
        scaled = _scaled(moment)
        first, second, alone = split_pairs(np.arange(scaled.shape[-1]), rotary)
        places = np.stack([first, second], axis=-1)
        pairs = _factors(_definite(scaled[:, places[:, :, None], places[:, None, :]]))
        rest, _ = _factors(_definite(scaled[:, alone, alone][..., None, None]))
        factor, back = (
            mx.stack([t[:, :, 0, 0], t[:, :, 1, 0], t[:, :, 1, 1]])[:, :, None] for t in pairs
        )
        rest = rest[:, None, :, 0, 0]
        mx.eval(factor, back, rest)
        return cls(factor, back, rest, rotary)

    @property
    def dim(self) -> int:
        """Channels, ``D``."""
        return 2 * int(self.factor.shape[3]) + int(self.rest.shape[2])

    @property
    def table_bytes(self) -> int:
        """Bytes of the factors."""
        return int(self.factor.nbytes + self.back.nbytes + self.rest.nbytes)

    def forward(self, x: mx.array) -> mx.array:
        """``x L`` for ``(B, H, T, D)`` float32."""
        a, c, d = self.factor
        first, second, rest = split_pairs(x, self.rotary)
        return join_pairs(first * a + second * c, second * d, rest * self.rest, self.rotary)

    def inverse(self, z: mx.array) -> mx.array:
        """``z L^-1``."""
        a, c, d = self.back
        first, second, rest = split_pairs(z, self.rotary)
        return join_pairs(first * a + second * c, second * d, rest / self.rest, self.rotary)

    def query(self, q: mx.array) -> mx.array:
        """``q L^-T``."""
        a, c, d = self.back
        first, second, rest = split_pairs(q, self.rotary)
        return join_pairs(first * a, first * c + second * d, rest / self.rest, self.rotary)


def _factors(blocks: Float64) -> tuple[mx.array, mx.array]:
    """``L`` and ``L^-1`` of every block, float32."""
    factor = np.linalg.cholesky(blocks)
    tables = mx.array(factor.astype(np.float32)), mx.array(np.linalg.inv(factor).astype(np.float32))
    mx.eval(tables)
    return tables
