"""The kinds of stage, and the law of each.

A pipeline for the vectors of one layer is ``centre -> transform -> coder``:

- a *transform* maps arrays to arrays and is exact in the logits;
- a *coder* maps arrays to the fields that are stored, and back with an error;
- a *quantiser* is the inner half of most coders: vectors of unit scale to small integers.

Every stage is token-local: what a token is coded to depends on that token alone, so chunking,
batching and order cannot matter. Arrays are float32 ``(B, H, T, D)`` throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import mlx.core as mx

from kvcompress.schema import Field
from kvcompress.stages.products import dots, sums

Fields = Mapping[str, mx.array]

Careful = mx.array | bool
"""Which tokens get the more careful of two assignments: ``(B, T)`` bool, or all or none."""


@runtime_checkable
class Transform(Protocol):
    """An invertible linear map ``z = x A`` of the channels, the same for every token.

    Laws: ``inverse(forward(x)) = x`` and ``<query(q), forward(x)> = <q, x>``.
    """

    @property
    def dim(self) -> int:
        """Channels of the input and the output."""
        ...

    @property
    def table_bytes(self) -> int:
        """Bytes of the arrays this stage keeps for all sequences together."""
        ...

    def forward(self, x: mx.array) -> mx.array:
        """``x A`` for ``(B, H, T, D)`` float32."""
        ...

    def inverse(self, z: mx.array) -> mx.array:
        """``z A^-1``."""
        ...

    def query(self, q: mx.array) -> mx.array:
        """``q A^-T``, so that scores against ``forward(x)`` equal scores against ``x``."""
        ...


@runtime_checkable
class Quantiser(Protocol):
    """Vectors whose entries have unit variance to integers, and back.

    Laws: codes lie in ``[0, 2**bits)``; each is the nearest entry of the codebook, ties to the
    lower index; a codebook that holds the data gives no error; distortion falls with bits.
    """

    @property
    def bits(self) -> int:
        """Bits a code, 1 to 12."""
        ...

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        ...

    @property
    def codes(self) -> int:
        """Codes a vector."""
        ...

    @property
    def table_bytes(self) -> int:
        """Bytes of the codebooks."""
        ...

    def encode(self, u: mx.array) -> mx.array:
        """``(B, H, T, dim)`` float32 to ``(B, H, T, codes)`` uint8, or uint16 above 8 bits."""
        ...

    def decode(self, codes: mx.array) -> mx.array:
        """``(B, H, T, codes)`` to ``(B, H, T, dim)`` float32."""
        ...


@runtime_checkable
class Coder(Protocol):
    """Vectors to stored fields and back; attention may read the fields directly.

    Laws: fields have the shapes and dtypes that ``fields`` declares; ``scores(q, f)`` equals
    ``q . decode(f)`` and ``mix(p, f)`` equals ``p @ decode(f)`` up to round-off. A field that heads
    share may also be read with a row for each head, where each reads other tokens.
    """

    @property
    def fields(self) -> tuple[Field, ...]:
        """What is stored for a token, names without the ``k.`` or ``v.`` prefix."""
        ...

    @property
    def table_bytes(self) -> int:
        """Bytes of tables shared by all sequences."""
        ...

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        """``(B, H, T, D)`` float32 to one array ``(B, heads, T, width)`` a field."""
        ...

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields of ``T`` tokens to ``(B, H, T, D)`` float32."""
        ...

    def scores(self, q: mx.array, fields: Fields) -> mx.array:
        """``(B, H, M, D)`` float32 queries against ``T`` tokens: ``(B, H, M, T)``."""
        ...

    def mix(self, weights: mx.array, fields: Fields) -> mx.array:
        """``(B, H, M, T)`` float32 weights over ``T`` tokens: ``(B, H, M, D)``."""
        ...


@runtime_checkable
class BandCoder(Coder, Protocol):
    """A coder that scores tokens against queries that differ from band to band.

    Law: ``band_scores(q, f, band)[..., t]`` equals ``scores(q[:, :, band[t]], f)[..., t]``.
    """

    def band_scores(self, q: mx.array, fields: Fields, band: mx.array) -> mx.array | None:
        """Every token's scores with the queries of its band.

        Args:
            q: ``(B, H, n, M, D)`` float32, the queries of each of ``n`` bands.
            fields: Those of ``T`` tokens.
            band: ``(T,)`` uint32, the tokens' bands.

        Returns:
            ``(B, H, M, T)``, or ``None`` where band after band is cheaper.
        """
        ...


@runtime_checkable
class CarefulCoder(Coder, Protocol):
    """A coder that may have two assignments to the same codes, of which one takes more care.

    Laws: what a token is coded to depends on that token and its own mark alone, and it decodes
    without the mark; all marked is what :meth:`encode` does by default.
    """

    @property
    def assignments(self) -> int:
        """1, where marks are of no account, or 2."""
        ...

    def encode(self, z: mx.array, careful: Careful = True) -> dict[str, mx.array]:
        """``(B, H, T, D)`` float32 to one array a field."""
        ...

    def importance(self, z: mx.array) -> mx.array:
        """How much it matters that a token is coded well, for want of its queries: ``(B, T)``."""
        ...


class DecodingCoder:
    """A coder's attention by decoding first: the reference, for coders with no faster path."""

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields to ``(B, H, T, D)`` float32."""
        raise NotImplementedError

    def scores(self, q: mx.array, fields: Fields) -> mx.array:
        """Decode the tokens, then ``q . z``."""
        return dots(q, self.decode(fields))

    def mix(self, weights: mx.array, fields: Fields) -> mx.array:
        """Decode the tokens, then ``p @ z``."""
        return sums(weights, self.decode(fields))
