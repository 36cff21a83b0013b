"""Vectors stored as the codes of a vector quantiser; attention reads the codes."""

from __future__ import annotations

import mlx.core as mx
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.schema import Field
from kvcompress.stages.base import Careful, Fields
from kvcompress.stages.gain import decode_gain, encode_gain, row_gain
from kvcompress.stages.pack import pack, unpack, words
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.tables import TableQuantiser, table_scores, tables_pay


@frozen
class VQCoder:
    """Codes of a vector quantiser, and a gain where the quantiser is for vectors of unit scale.

    Fields: ``codes``, bytes at 8 bits, else packed words; with a gain ``gain``, uint16, one for
    all heads of a token as in CommVQ (:mod:`kvcompress.stages.gain`).

    Attributes:
        quantiser: Codes the vectors, or with a gain the vectors divided by it.
        heads: Heads of a layer, ``H``.
        gain: Whether the root mean square over all heads and channels is taken out.
        plain: A second assignment to the same codebook, for tokens that are not marked to be
            coded with care; ``None`` where ``quantiser`` codes all.
    """

    quantiser: TableQuantiser
    heads: int
    gain: bool = False
    plain: TableQuantiser | None = None
    _fields: tuple[Field, ...] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.plain is not None and _sizes(self.plain) != _sizes(self.quantiser):
            raise ConfigError(
                f"VQCoder: plain must be of the quantiser's codebook, with (bits, codes, dim) "
                f"{_sizes(self.quantiser)} (got {_sizes(self.plain)})"
            )
        count, bits = self.quantiser.codes, self.quantiser.bits
        dtype, width = ("uint8", count) if bits == 8 else ("uint32", words(count, bits))
        codes = Field("codes", dtype, width, self.heads, payload_bits=count * bits)
        gain = (Field("gain", "uint16", 1, 1),) if self.gain else ()
        object.__setattr__(self, "_fields", (codes, *gain))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Codes, and the gain."""
        return self._fields

    @property
    def table_bytes(self) -> int:
        """Bytes of the quantiser's tables, and of a metric of the plain assignment's own."""
        metric = self.plain.metric if isinstance(self.plain, ProductVQ) else None
        return self.quantiser.table_bytes + (0 if metric is None else int(metric.nbytes))

    @property
    def assignments(self) -> int:
        """How many ways there are to the codes."""
        return 1 if self.plain is None else 2

    def encode(self, z: mx.array, careful: Careful = True) -> dict[str, mx.array]:
        """``(B, H, T, D)`` float32 to codes and gain."""
        if not self.gain:
            return {"codes": self._write(self._assign(z, careful))}
        B, H, T, D = z.shape
        rms, _ = row_gain(z.swapaxes(1, 2).reshape(B, 1, T, H * D))
        gain = encode_gain(rms)
        scale = decode_gain(gain)  # what decoding multiplies by
        unit = z / mx.where(scale > 0, scale, 1.0)
        return {"codes": self._write(self._assign(unit, careful)), "gain": gain}

    def _assign(self, u: mx.array, careful: Careful) -> mx.array:
        if self.plain is None or careful is True:
            return self.quantiser.encode(u)
        if careful is False:
            return self.plain.encode(u)
        marks = careful[:, None, :, None]
        return mx.where(marks, self.quantiser.encode(u), self.plain.encode(u))

    def importance(self, z: mx.array) -> mx.array:
        """The expected square of a token's score, up to a factor: ``(B, H, T, D)`` to ``(B, T)``.

        ``z M z^T`` with the metric of a product quantiser, else ``|z|^2``, summed over the heads.
        """
        if isinstance(self.quantiser, ProductVQ):
            return self.quantiser.energy(z).sum(axis=1)
        return mx.square(z).sum(axis=-1).sum(axis=1)

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields to ``(B, H, T, D)`` float32."""
        decoded = self.quantiser.decode(self._read(fields["codes"]))
        return decoded * decode_gain(fields["gain"]) if self.gain else decoded

    def scores(self, q: mx.array, fields: Fields) -> mx.array:
        """``q . z``: a table of each query's scores and look-ups, or decoding where rows are many.

        ``(B, H, M, D)`` float32 to ``(B, H, M, T)``.
        """
        codes = self._read(fields["codes"])
        if tables_pay(self.quantiser, rows=q.shape[2], tokens=codes.shape[2]):
            scores = table_scores(self.quantiser, q[:, :, None], codes)
        else:
            scores = self.quantiser.dots(q, codes)
        return scores * decode_gain(fields["gain"]).swapaxes(-1, -2) if self.gain else scores

    def band_scores(self, q: mx.array, fields: Fields, band: mx.array) -> mx.array | None:
        """A table for every band's queries, side by side, and one look-up of a code in its band's.

        Arguments and result are those of :class:`kvcompress.stages.base.BandCoder`.
        """
        B, H, n, M, _ = q.shape
        codes = self._read(fields["codes"])
        if not tables_pay(self.quantiser, rows=M, tokens=codes.shape[2], heads=B * H, bands=n):
            return None
        scores = table_scores(self.quantiser, q, codes, band)
        return scores * decode_gain(fields["gain"]).swapaxes(-1, -2) if self.gain else scores

    def mix(self, weights: mx.array, fields: Fields) -> mx.array:
        """``p @ z``: ``(B, H, M, T)`` float32 to ``(B, H, M, D)``."""
        if self.gain:
            weights = weights * decode_gain(fields["gain"]).swapaxes(-1, -2)
        return self.quantiser.sums(weights, self._read(fields["codes"]))

    def _write(self, codes: mx.array) -> mx.array:
        return codes if self.quantiser.bits == 8 else pack(codes, self.quantiser.bits)

    def _read(self, stored: mx.array) -> mx.array:
        if self.quantiser.bits == 8:
            return stored
        return unpack(stored, self.quantiser.bits, self.quantiser.codes)


def _sizes(quantiser: TableQuantiser) -> tuple[int, int, int]:
    return quantiser.bits, quantiser.codes, quantiser.dim
