"""Rotation as an anchor's and an exact rest's, by tables that all layers share.

MLX rounds the phase of a far position by its own way at every position. Here a position is an
anchor, a multiple of ``PIECE``, and a rest whose phases are exact, so that whatever turns something
to a position means the same rotation, however tokens are cut into runs. And no phase is computed
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final

import mlx.core as mx
import numpy as np

from kvcompress.layers import Positions, Rotary
from kvcompress.stages.pairs import turn_pairs

PIECE: Final = 4096
"""Positions from one anchor to the next, and rows of the table of phases."""


def pieces(positions: range) -> Iterator[tuple[int, int, int]]:
    """Cut a run at the anchors: the anchor, the first position and the one after the last."""
    start = positions.start
    while start < positions.stop:
        anchor = start - start % PIECE
        stop = min(positions.stop, anchor + PIECE)
        yield anchor, start, stop
        start = stop


def turned(x: mx.array, rotary: Rotary, rests: slice | mx.array) -> mx.array:
    """Rotate rows by their rests: ``(..., T or 1, D)`` to ``(..., T, D)``."""
    table = phases(rotary)[rests]
    half = rotary.dims // 2
    return turn_pairs(x, rotary, table[:, :half], table[:, half:])


def all_at(turn: Callable[[mx.array, Positions], mx.array], x: mx.array, position: int) -> mx.array:
    """Rows ``(B, H, M, D)``, all turned by one position.

    Args:
        turn: A rotation's ``rotate`` or ``unrotate``.
        x: The rows.
        position: How far.
    """
    B, H, M, D = x.shape
    rows = turn(x.reshape(B, H * M, 1, D), range(position, position + 1))
    return rows.reshape(B, H, M, D)


@lru_cache(maxsize=16)
def phases(rotary: Rotary) -> mx.array:
    """``[cos(d t), sin(d t)]`` for ``0 <= d < PIECE``: ``(PIECE, dims)`` float32."""
    turns = np.arange(PIECE, dtype=np.float64)[:, None] * rotary.angles
    table = mx.array(np.concatenate([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32))
    mx.eval(table)
    return table
