"""Exact phases of rotated positions: an anchor's, and those of the positions that follow it.

MLX rounds the phase of a far position by its own way at every position. A position here is an
anchor and a rest of less than :data:`PIECE`, whose phases are both computed in float64.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcompress.layers import Rotary
from kvcompress.stages.shared import shared_table

PIECE = 4096
"""Rows of a table of phases."""


@lru_cache(maxsize=16)
def phases(rotary: Rotary) -> mx.array:
    """``cos(d t), -sin(d t)`` of each pair for ``0 <= d < PIECE``: ``(PIECE, dims)`` float32."""
    turns = np.arange(PIECE, dtype=np.float64)[:, None] * rotary.angles
    table = np.stack([np.cos(turns), -np.sin(turns)], axis=-1)
    return shared_table(table.reshape(PIECE, -1))


@lru_cache(maxsize=1024)
def turn(rotary: Rotary, position: int) -> NDArray[np.complex64]:
    """``exp(i t)`` of a position's phases, ``(dims / 2,)``."""
    return np.exp(1j * position * rotary.angles).astype(np.complex64)
