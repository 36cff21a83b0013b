"""Centring: take the constant part out of the vectors before they are coded.

Keys of real models carry a large mean before RoPE. A code that need not spend bits on it is
several times better at 1 and 2 bits. The mean is known beforehand (``fixed``), or is that of the
sequence's own first coded tokens, frozen and kept with the sequence (``sequence``).
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.layers import Positions, Rotary
from kvcompress.stages.shared import shared_table

_PIECE = 4096  # tokens a matrix of phases spans; longer runs turn the query instead


@frozen(eq=False)
class Centre:
    """The vector that is subtracted, one a head.

    Attributes:
        tokens: How many first coded tokens the mean is taken from; 0 where it is not.
        mean: ``(H, D)`` float32 of a calibration; ``None`` where there is none.
    """

    tokens: int = 0
    mean: mx.array | None = field(default=None)

    @property
    def active(self) -> bool:
        """Whether anything is subtracted at all."""
        return self.tokens > 0 or self.mean is not None

    @property
    def table_bytes(self) -> int:
        """Bytes shared by all sequences."""
        return 0 if self.mean is None else int(self.mean.nbytes)

    def of(self, x: mx.array) -> mx.array:
        """The mean of a sequence's first tokens.

        Args:
            x: ``(B, H, T, D)`` float32, unrotated.

        Returns:
            ``(B, H, 1, D)`` float32: what is kept is what is subtracted.
        """
        count = min(self.tokens, x.shape[2])
        return (x[:, :, :count] * (1.0 / count)).sum(axis=2, keepdims=True)


def no_centre() -> Centre:
    """Nothing is subtracted."""
    return Centre()


def sequence_centre(tokens: int = 64) -> Centre:
    """The mean of the sequence's own first coded tokens."""
    return Centre(tokens=tokens)


def fixed_centre(mean: np.ndarray | mx.array) -> Centre:
    """A calibrated mean ``(H, D)``, in the unrotated frame for keys."""
    return Centre(mean=shared_table(np.asarray(mean, dtype=np.float32)))


def rotated(mean: mx.array, rotary: Rotary | None, positions: Positions) -> mx.array:
    """A head's mean as the keys at ``positions`` bear it: ``(B, H, T, D)`` or ``(B, H, 1, D)``."""
    if rotary is None:
        return mean
    B, H, _, D = mean.shape
    return rotary.rotate(mx.broadcast_to(mean, (B, H, len(positions), D)), positions)


def mean_scores(
    q: mx.array, mean: mx.array, rotary: Rotary | None, start: int, count: int
) -> mx.array:
    """``q . R_j mean`` for the positions ``start <= j < start + count``, without making keys.

    With the query turned back by ``start``, a pair contributes ``a cos(d t) + b sin(d t)`` for
    ``d = j - start``; the phases of ``d`` are the same for every head, layer and sequence, so
    the scores of all tokens are one matrix product with a shared table.

    Args:
        q: ``(B, H, M, D)`` float32, post-RoPE.
        mean: ``(B, H, 1, D)`` float32, unrotated.
        rotary: The keys' rotation, or ``None``.
        start: Position of the first token.
        count: Number of tokens.

    Returns:
        ``(B, H, M, count)`` float32, or ``(B, H, M, 1)`` where nothing rotates.
    """
    if rotary is None:
        return q @ mean.swapaxes(-1, -2)
    pieces = []
    for first in range(0, count, _PIECE):
        size = min(_PIECE, count - first)
        # A row's M queries stand at one position here: each is turned by the same -start.
        turned = _turn_all(q, rotary, -(start + first))
        even, odd, rest = _pairs(turned, rotary)
        mean_even, mean_odd, mean_rest = _pairs(mean, rotary)
        waves = mx.concatenate(
            [even * mean_even + odd * mean_odd, odd * mean_even - even * mean_odd], axis=-1
        )
        scores = waves @ _phases(rotary, _PIECE)[:size].T
        if rest is not None and mean_rest is not None:
            scores = scores + rest @ mean_rest.swapaxes(-1, -2)
        pieces.append(scores)
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-1)


def _turn_all(q: mx.array, rotary: Rotary, offset: int) -> mx.array:
    """Rotate every row by the same ``offset`` (rope itself counts up along the rows)."""
    B, H, M, D = q.shape
    return rotary.rotate(q.reshape(B, H * M, 1, D), range(offset, offset + 1)).reshape(B, H, M, D)


def _pairs(x: mx.array, rotary: Rotary) -> tuple[mx.array, mx.array, mx.array | None]:
    """First and second channel of each pair, and the channels that do not rotate."""
    head, half = x[..., : rotary.dims], rotary.dims // 2
    rest = x[..., rotary.dims :] if x.shape[-1] > rotary.dims else None
    if rotary.traditional:
        return head[..., 0::2], head[..., 1::2], rest
    return head[..., :half], head[..., half:], rest


@lru_cache(maxsize=16)
def _phases(rotary: Rotary, count: int) -> mx.array:
    """``[cos(d t), sin(d t)]`` for ``0 <= d < count``: ``(count, dims)`` float32."""
    turns = np.arange(count, dtype=np.float64)[:, None] * rotary.angles
    table = mx.array(np.concatenate([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32))
    mx.eval(table)
    return table
