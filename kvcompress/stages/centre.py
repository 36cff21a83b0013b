"""Centring: take the constant part out of the vectors before they are coded.

Keys of real models carry a large mean before RoPE. A code that need not spend bits on it is
several times better at 1 and 2 bits. The mean is known beforehand (``fixed``), or is that of the
sequence's own first coded tokens, frozen and kept with the sequence (``sequence``).
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.config.option import shown
from kvcompress.errors import ConfigError
from kvcompress.layers import Positions, Rotary
from kvcompress.stages.pairs import turn_pairs
from kvcompress.stages.phases import PIECE, phases, turn
from kvcompress.stages.shared import shared_table


@frozen(eq=False)
class Centre:
    """The vector that is subtracted, one a head.

    Attributes:
        tokens: How many first coded tokens the mean is taken from; 0 where it is not.
        row: ``(1, H, 1, D)`` float32, the mean of a calibration; ``None`` where there is none.
    """

    tokens: int = 0
    row: mx.array | None = field(default=None)

    def __attrs_post_init__(self) -> None:
        if self.tokens < 0:
            raise ConfigError(f"Centre: tokens must be at least 0 (got {self.tokens})")

    @property
    def mean(self) -> mx.array | None:
        """The mean of a calibration, ``(H, D)``."""
        return None if self.row is None else self.row[0, :, 0]

    @property
    def active(self) -> bool:
        """Whether anything is subtracted at all."""
        return self.tokens > 0 or self.row is not None

    @property
    def table_bytes(self) -> int:
        """Bytes shared by all sequences."""
        return 0 if self.row is None else int(self.row.nbytes)

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
    """The mean of the sequence's own first coded tokens.

    Raises:
        ConfigError: The number of tokens is negative.
    """
    return Centre(tokens=tokens)


def fixed_centre(mean: np.ndarray | mx.array) -> Centre:
    """A calibrated mean ``(H, D)``, in the unrotated frame for keys.

    Raises:
        ConfigError: It has another number of axes, or numbers that are not finite.
    """
    whole = mean.astype(mx.float32) if isinstance(mean, mx.array) else mean
    table = np.asarray(whole, dtype=np.float32)
    if table.ndim != 2 or not np.isfinite(table).all():
        raise ConfigError(f"Centre: mean must be finite, of shape (H, D) (got {shown(mean)})")
    return Centre(row=shared_table(table[None, :, None]))


def rotated(mean: mx.array, rotary: Rotary | None, positions: Positions) -> mx.array:
    """A head's mean as the keys at ``positions`` bear it.

    MLX rounds the phase of a far position by its own way at every position. Here a position is an
    anchor, a multiple of ``PIECE``, and a rest, both with exact phases, so that encoding, decoding
    and scores all mean the same vector however tokens are cut into runs.

    Args:
        mean: ``(B, H, 1, D)`` float32, unrotated.
        rotary: The keys' rotation, or ``None``.
        positions: The ``T`` positions.

    Returns:
        ``(B, H, T, D)``, or ``(B, H, 1, D)`` where nothing rotates.
    """
    if rotary is None:
        return mean
    if not isinstance(positions, range):
        places = np.asarray(positions, dtype=np.int64)
        anchors, own = np.unique(places - places % PIECE, return_inverse=True)
        spread = _anchored(mean, rotary, anchors.tolist())[:, :, mx.array(own)]
        return _turned(spread, rotary, mx.array(places % PIECE))
    cuts = list(_pieces(positions))
    if len(cuts) > 1 and 2 * len(positions) > PIECE:  # whole pieces at once, however many
        first = cuts[0][0]
        whole = _piece(mean, rotary, [anchor for anchor, _, _ in cuts], slice(PIECE))
        return whole[:, :, positions.start - first : positions.stop - first]
    pieces = [
        _piece(mean, rotary, [anchor], slice(start - anchor, stop - anchor))
        for anchor, start, stop in cuts
    ]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def _pieces(positions: range) -> Iterator[tuple[int, int, int]]:
    """Cut a run at the anchors: the anchor, the first position and the one after the last."""
    start = positions.start
    while start < positions.stop:
        anchor = start - start % PIECE
        stop = min(positions.stop, anchor + PIECE)
        yield anchor, start, stop
        start = stop


def _anchored(mean: mx.array, rotary: Rotary, anchors: list[int]) -> mx.array:
    """The mean at each anchor, ``(B, H, anchors, D)``."""
    if anchors == [0]:
        return mean
    turns = np.stack([turn(rotary, anchor) for anchor in anchors])
    return turn_pairs(mean, rotary, mx.array(turns.real), mx.array(turns.imag))


def _piece(mean: mx.array, rotary: Rotary, anchors: list[int], rests: slice) -> mx.array:
    """The mean at the same rests from each anchor, ``(B, H, anchors * rests, D)``."""
    return _turned(_anchored(mean, rotary, anchors)[..., None, :], rotary, rests).flatten(2, 3)


def _turned(anchored: mx.array, rotary: Rotary, rests: slice | mx.array) -> mx.array:
    table = phases(rotary)[rests]
    return turn_pairs(anchored, rotary, table[:, ::2], -table[:, 1::2])
