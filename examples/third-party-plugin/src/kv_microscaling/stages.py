"""Tiny floats, and rows of them that share a power of two in small groups of channels.

The formats are those of Rouhani et al., "Microscaling Data Formats for Deep Learning" (arXiv
2310.10537): an element of 4 bits is their E2M1 (MXFP4), one of 6 bits their E2M3 (MXFP6).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.schema import Field
from kvcompress.stages.base import DecodingCoder, Fields
from kvcompress.stages.pack import pack, unpack, words
from kvcompress.stages.shared import shared_table

_MANTISSA = 23  # bits of a float32's mantissa, above which its exponent stands


@frozen
class TinyFloats:
    """Each channel to the nearest float of one sign bit, two of exponent, the rest mantissa.

    Attributes:
        dim: Channels of a vector.
        bits: Bits a channel, 3 to 8.
    """

    dim: int
    bits: int
    _values: mx.array = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 3 <= self.bits <= 8:
            raise ConfigError(f"TinyFloats: bits must be from 3 to 8 (got {self.bits})")
        # As integers do, codes of one sign grow with the number that they stand for.
        code = np.arange(self._half)
        binade = np.maximum(code // self._steps, 1) - 1
        sizes = (code / self._steps - binade) * 2.0**binade
        object.__setattr__(self, "_values", shared_table(np.concatenate([sizes, -sizes])))

    @property
    def codes(self) -> int:
        """Codes a vector: one a channel."""
        return self.dim

    @property
    def table_bytes(self) -> int:
        """Bytes of the table that decodes."""
        return int(self._values.nbytes)

    @property
    def largest(self) -> float:
        """The largest number there is."""
        return 8.0 - 4.0 / self._steps

    @property
    def _half(self) -> int:
        """Codes of one sign; the other sign's codes follow."""
        return 1 << (self.bits - 1)

    @property
    def _steps(self) -> int:
        """Steps from one power of two to the next."""
        return 1 << (self.bits - 3)

    def encode(self, u: mx.array) -> mx.array:
        """``(..., dim)`` float32 to codes, uint8; what is too large takes the largest."""
        size = mx.abs(u)
        binade = (size >= 2).astype(mx.float32) + (size >= 4).astype(mx.float32)
        step = mx.where(size < 2, 1.0, mx.where(size < 4, 2.0, 4.0)) / self._steps
        code = mx.minimum(mx.round(size / step) + binade * self._steps, self._half - 1)
        return (code + mx.where(u < 0, self._half, 0)).astype(mx.uint8)

    def decode(self, codes: mx.array) -> mx.array:
        """``(..., dim)`` codes to numbers, float32."""
        return mx.take(self._values, codes)


@frozen
class Microscaled(DecodingCoder):
    """``z ~ 2**exponent * floats[codes]`` with one exponent for every ``group`` channels.

    The exponent is the least that keeps the group's largest channel in range, so nothing is cut
    off. The last group is short where ``group`` does not divide the channels.

    Fields: ``codes``, packed words; ``exponents``, uint8, 127 more than the power (E8M0).

    Attributes:
        floats: Codes the channels.
        heads: Heads of a layer, ``H``.
        group: Channels that share an exponent.
    """

    floats: TinyFloats
    heads: int
    group: int = 32

    @property
    def fields(self) -> tuple[Field, ...]:
        """Codes and exponents."""
        dim, bits = self.floats.dim, self.floats.bits
        return (
            Field("codes", "uint32", words(dim, bits), self.heads, payload_bits=dim * bits),
            Field("exponents", "uint8", -(-dim // self.group), self.heads),
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of the floats' table."""
        return self.floats.table_bytes

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        """``(B, H, T, D)`` float32 to codes and exponents."""
        groups = self._grouped(z)
        exponents = _least_power(mx.abs(groups).max(axis=-1) / self.floats.largest)
        scaled = groups / _power(exponents)[..., None]
        codes = self.floats.encode(scaled.flatten(-2)[..., : self.floats.dim])
        return {"codes": pack(codes, self.floats.bits), "exponents": exponents}

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields to ``(B, H, T, D)`` float32."""
        codes = unpack(fields["codes"], self.floats.bits, self.floats.dim)
        groups = self._grouped(self.floats.decode(codes))
        scaled = groups * _power(fields["exponents"])[..., None]
        return scaled.flatten(-2)[..., : self.floats.dim]

    def _grouped(self, rows: mx.array) -> mx.array:
        """``(B, H, T, D)`` to ``(B, H, T, groups, group)``, zeros added at the end."""
        missing = -self.floats.dim % self.group
        padded = mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else rows
        return padded.reshape(*rows.shape[:-1], -1, self.group)


def _least_power(size: mx.array) -> mx.array:
    """The exponent of the least power of two that is not smaller, uint8; 1 at least."""
    rounded_up = size.view(mx.uint32) + ((1 << _MANTISSA) - 1)
    return mx.maximum(rounded_up >> _MANTISSA, 1).astype(mx.uint8)


def _power(exponents: mx.array) -> mx.array:
    """The powers of two of exponents, float32."""
    return (exponents.astype(mx.uint32) << _MANTISSA).view(mx.float32)
