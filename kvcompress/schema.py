"""What a codec stores for a token, and so how many bytes a cache of any length takes."""

from __future__ import annotations

import mlx.core as mx
from attrs import frozen

_ITEM_BYTES = {
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}


@frozen
class Field:
    """One array that a codec keeps: ``(B, heads, T, width)`` of ``dtype``.

    Attributes:
        name: Unique in the schema; key fields start with ``k.``, value fields with ``v.``.
        dtype: Name of the stored dtype.
        width: Items a token and head.
        heads: Heads the field is kept for; 1 where all heads share it.
        payload_bits: Bits a token and head that carry codes; the rest of the field (gains,
            scales, padding to whole words) is side information.
    """

    name: str
    dtype: str
    width: int
    heads: int
    payload_bits: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of one token over all heads of the field."""
        return self.heads * self.width * _ITEM_BYTES[self.dtype]

    def allocate(self, batch: int, tokens: int) -> mx.array:
        """A zeroed array ``(batch, heads, tokens, width)``."""
        return mx.zeros((batch, self.heads, tokens, self.width), getattr(mx, self.dtype))


@frozen
class Schema:
    """The fields of a codec: those kept for each token, and those kept once a sequence.

    The law: the bytes that this arithmetic predicts are the bytes that a cache stores.

    Attributes:
        fields: What is kept for a coded token.
        constants: What is kept once.
        exact_bytes: Bytes that a token takes while it is exact, beside its key and value.
    """

    fields: tuple[Field, ...]
    constants: tuple[Field, ...] = ()
    exact_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of one coded token, keys and values, all heads."""
        return sum(f.bytes_per_token for f in self.fields)

    @property
    def constant_bytes(self) -> int:
        """Bytes kept once a sequence, whatever its length."""
        return sum(f.bytes_per_token for f in self.constants)

    def part_bytes(self, prefix: str) -> int:
        """Bytes a token of the fields whose name starts with ``prefix`` (``"k."``, ``"v."``)."""
        return sum(f.bytes_per_token for f in self.fields if f.name.startswith(prefix))

    @property
    def payload_bits(self) -> int:
        """Code bits of one token, keys and values, all heads."""
        return sum(f.payload_bits * f.heads for f in self.fields)
