"""An embedded code in two planes, of which the upper is a complete coarser code by itself."""

from __future__ import annotations

import mlx.core as mx
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.schema import Field
from kvcompress.stages.base import DecodingCoder, Fields
from kvcompress.stages.book import Book
from kvcompress.stages.gain import GainForm, corrected, decode_gain, encode_gain, row_gain
from kvcompress.stages.gain_coder import check_form
from kvcompress.stages.levels import LloydMaxLevels, tree_book
from kvcompress.stages.pack import words


@frozen
class TreeCoder(DecodingCoder):
    """A residual quantiser whose second stage has its own levels in each cell of the first.

    A second stage fitted to the residual of all cells together loses half its worth; one for each
    cell is within 2 % of a single-stage code of the same bits, and keeps what a second stage is
    for: :meth:`first_plane` reads a third to a half of the bytes and is the best code of its bits.

    Fields: ``high`` and ``low``, packed words of ``ceil(bits / 2)`` and ``floor(bits / 2)`` bits a
    channel; ``gain``, uint16.

    Attributes:
        dim: Channels, ``D``.
        heads: Heads of a layer, ``H``.
        bits: Bits a channel in both planes, 2 to 8.
        form: What the stored gain makes exact for the whole code.
    """

    dim: int
    heads: int
    bits: int
    form: GainForm = "matched"
    _book: Book = field(init=False, eq=False, repr=False)
    _first: LloydMaxLevels = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        check_form("TreeCoder", self.form)
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"TreeCoder: bits must be from 2 to 8 (got {self.bits})")
        object.__setattr__(self, "_book", tree_book(self.dim, self.high_bits, self.low_bits))
        object.__setattr__(self, "_first", LloydMaxLevels(self.dim, self.high_bits))

    @property
    def high_bits(self) -> int:
        """Bits a channel of the upper plane."""
        return (self.bits + 1) // 2

    @property
    def low_bits(self) -> int:
        """Bits a channel of the lower plane."""
        return self.bits // 2

    @property
    def fields(self) -> tuple[Field, ...]:
        """Both planes and the gain."""
        planes = (("high", self.high_bits), ("low", self.low_bits))
        return (
            *(
                Field(name, "uint32", words(self.dim, b), self.heads, payload_bits=b * self.dim)
                for name, b in planes
            ),
            Field("gain", "uint16", 1, self.heads),
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of the whole code and of the first plane."""
        return self._book.table_bytes + self._first.table_bytes

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        """``(B, H, T, D)`` float32 to both planes and the gain."""
        gain, unit = row_gain(z)
        low, high = self._book.write(self._book.encode(unit))
        if self.form != "raw":
            decoded = self._book.read([low, high], self.dim)
            gain = corrected(gain, unit, decoded, self.form)
        return {"high": high, "low": low, "gain": encode_gain(gain)}

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields to ``(B, H, T, D)`` float32."""
        unit = self._book.read([fields["low"], fields["high"]], self.dim)
        return unit * decode_gain(fields["gain"])

    def first_plane(self, fields: Fields) -> mx.array:
        """Decode ``high`` and ``gain`` alone, ``low`` need not be there: ``(B, H, T, D)``."""
        unit = self._first.book.read([fields["high"]], self.dim)
        return unit * decode_gain(fields["gain"])
