"""Scalar codebooks as MLX tables: look-ups that are exact, bounded in memory and fast."""

from __future__ import annotations

from functools import reduce
from itertools import accumulate

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.fit.lloyd_max import Levels
from kvcompress.stages.pack import pack, unpack

_COUNTED = 15  # thresholds up to which counting them beats a table of cells


@frozen(eq=False)
class Book:
    """Sorted levels, and codes of them that are stored in one plane of bits or in several.

    Attributes:
        levels: The levels, thresholds and their law.
        widths: Bits of each plane, the plane of the lowest bits first; 8 in all at most.
    """

    levels: Levels
    widths: tuple[int, ...]
    _table: mx.array = field(init=False)
    _joint: mx.array | None = field(init=False)
    _cells: _Cells | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        table = self.levels.levels.astype(np.float32)
        edges = self.levels.thresholds.astype(np.float32)
        object.__setattr__(self, "_table", mx.array(table))
        joint = table[_joint_codes(self.widths)]
        object.__setattr__(self, "_joint", mx.array(joint) if joint.shape[1] > 1 else None)
        object.__setattr__(self, "_cells", _Cells.of(edges) if len(edges) > _COUNTED else None)
        mx.eval(self._table, self._joint)

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables."""
        parts = (self._table, self._joint, self._cells)
        return sum(int(part.nbytes) for part in parts if part is not None)

    def encode(self, u: mx.array) -> mx.array:
        """Number of thresholds below each entry: ``u``'s shape, uint8; a tie goes down."""
        if self._cells is not None:
            return self._cells.encode(u)
        code = mx.zeros(u.shape, mx.uint8)
        for edge in self.levels.thresholds.astype(np.float32).tolist():
            code = code + (u > edge).astype(mx.uint8)
        return code

    def decode(self, codes: mx.array) -> mx.array:
        """Codes of any shape to their levels, float32."""
        return mx.take(self._table, codes)

    def write(self, codes: mx.array) -> list[mx.array]:
        """Codes ``(..., n)`` to the packed words of each plane."""
        starts = accumulate(self.widths, initial=0)
        parts = [(codes >> s) & (2**w - 1) for w, s in zip(self.widths, starts, strict=False)]
        return [pack(part, width) for part, width in zip(parts, self.widths, strict=True)]

    def read(self, planes: list[mx.array], count: int) -> mx.array:
        """Packed words of each plane to levels ``(..., count)``, several codes a look-up."""
        run = 1 if self._joint is None else int(self._joint.shape[1])
        if count % run:
            run = 1
        parts = [
            unpack(words, width * run, count // run)
            for words, width in zip(planes, self.widths, strict=True)
        ]
        starts = accumulate((width * run for width in self.widths), initial=0)
        index = reduce(mx.bitwise_or, [p << s for p, s in zip(parts, starts, strict=False)])
        if self._joint is None or run == 1:
            return self.decode(index)
        return mx.take(self._joint, index, axis=0).flatten(-2)


def _joint_codes(widths: tuple[int, ...]) -> np.ndarray:
    """The codes that one look-up yields: ``(2**(bits * run), run)``.

    As many neighbouring codes as fit 8 bits are looked up together. Their index holds the bits
    of the first plane of all of them, then those of the next plane.
    """
    run = 8 // sum(widths)
    index = np.arange(2 ** (sum(widths) * run))[:, None]
    codes = np.zeros((len(index), run), dtype=np.int64)
    taken = 0
    for width in widths:
        part = index >> (taken * run + width * np.arange(run))
        codes |= (part & (2**width - 1)) << taken
        taken += width
    return codes


@frozen(eq=False)
class _Cells:
    """The line cut into equal cells so narrow that each holds at most one threshold.

    A code is then the number of thresholds below the entry's cell, and one comparison with the
    threshold in it: two look-ups, whatever the number of levels.

    Attributes:
        below: Thresholds below each cell, uint8.
        inside: The threshold in each cell, float32; infinity where there is none.
        first: Where the first cell begins.
        rate: Cells a unit.
    """

    below: mx.array
    inside: mx.array
    first: float
    rate: float

    @classmethod
    def of(cls, edges: np.ndarray) -> _Cells:
        rate = float(np.float32(2.0 / np.diff(edges.astype(np.float64)).min()))
        first = float(np.float32(edges[0] - 1.0 / rate))
        count = int((edges[-1] - first) * rate) + 2
        cell = np.array(_cell_of(mx.array(edges), first, rate, count))
        inside = np.full(count, np.inf, dtype=np.float32)
        inside[cell] = edges
        below = np.searchsorted(cell, np.arange(count)).astype(np.uint8)
        cells = cls(mx.array(below), mx.array(inside), first, rate)
        mx.eval(cells.below, cells.inside)
        return cells

    @property
    def nbytes(self) -> int:
        return int(self.below.nbytes + self.inside.nbytes)

    def encode(self, u: mx.array) -> mx.array:
        cell = _cell_of(u, self.first, self.rate, self.below.size)
        return mx.take(self.below, cell) + (u > mx.take(self.inside, cell)).astype(mx.uint8)


def _cell_of(u: mx.array, first: float, rate: float, count: int) -> mx.array:
    # Round-off may shift a cell's border, but alike for entries and thresholds, and the map is
    # monotone: the answer stays exact.
    return mx.clip((u - first) * rate, 0, count - 1).astype(mx.uint16)
