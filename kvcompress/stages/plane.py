"""A plane: the packed codes of rows of unit scale, and attention that reads them with a gain."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
from attrs import field, frozen

from kvcompress.schema import Field
from kvcompress.stages.affine_words import AffineWords
from kvcompress.stages.base import Quantiser
from kvcompress.stages.levels import LloydMaxLevels, UniformLevels
from kvcompress.stages.pack import pack, unpack, words
from kvcompress.stages.products import dots, sums


class Plane(Protocol):
    """Packed codes of rows; ``gain`` is ``(B, H, T, 1)`` float32 and multiplies whole rows."""

    @property
    def quantiser(self) -> Quantiser:
        """What makes the codes."""
        ...

    def decode(self, packed: mx.array) -> mx.array:
        """Words ``(B, H, T, words)`` to rows of unit scale ``(B, H, T, dim)`` float32."""
        ...

    def scores(self, q: mx.array, packed: mx.array, gain: mx.array) -> mx.array:
        """``q . (gain * decode(packed))`` for ``(B, H, M, dim)`` queries: ``(B, H, M, T)``."""
        ...

    def mix(self, weights: mx.array, packed: mx.array, gain: mx.array) -> mx.array:
        """``weights @ (gain * decode(packed))`` for ``(B, H, M, T)``: ``(B, H, M, dim)``."""
        ...


def plane_of(quantiser: Quantiser) -> Plane:
    """The plane that reads a quantiser's codes fastest."""
    if isinstance(quantiser, UniformLevels):
        return _UniformPlane(quantiser)
    return _DecodedPlane(quantiser)


def plane_field(name: str, quantiser: Quantiser, heads: int) -> Field:
    """How a plane is stored."""
    width = words(quantiser.codes, quantiser.bits)
    return Field(name, "uint32", width, heads, payload_bits=quantiser.codes * quantiser.bits)


def write(quantiser: Quantiser, unit: mx.array) -> mx.array:
    """Rows of unit scale ``(B, H, T, dim)`` to packed codes."""
    return pack(quantiser.encode(unit), quantiser.bits)


@frozen
class _UniformPlane:
    """Codes of a uniform grid are affine: products read them without a table."""

    quantiser: UniformLevels
    _words: AffineWords = field(init=False)

    def __attrs_post_init__(self) -> None:
        affine = AffineWords(self.quantiser.dim, self.quantiser.bits)
        object.__setattr__(self, "_words", affine)

    def decode(self, packed: mx.array) -> mx.array:
        return self.quantiser.decode(unpack(packed, self.quantiser.bits, self.quantiser.dim))

    def scores(self, q: mx.array, packed: mx.array, gain: mx.array) -> mx.array:
        if not self._words.widens(q):
            return self._words.scores(q, packed, *self._affine(gain))
        products = self._words.products(q, packed, self.quantiser.step)
        lowest = q.sum(axis=-1, keepdims=True) * self.quantiser.lowest
        return (products + lowest) * gain.swapaxes(-1, -2)

    def mix(self, weights: mx.array, packed: mx.array, gain: mx.array) -> mx.array:
        if not self._words.widens(weights):
            return self._words.mix(weights, packed, *self._affine(gain))
        weights = weights * gain.swapaxes(-1, -2)
        lowest = weights.sum(axis=-1, keepdims=True) * self.quantiser.lowest
        return self._words.sums(weights, packed, self.quantiser.step) + lowest

    def _affine(self, gain: mx.array) -> tuple[mx.array, mx.array]:
        return gain * self.quantiser.step, gain * self.quantiser.lowest


@frozen
class _DecodedPlane:
    """Rows are decoded first; the gain goes to what is smaller, the rows or the scores."""

    quantiser: Quantiser

    def decode(self, packed: mx.array) -> mx.array:
        quantiser = self.quantiser
        if isinstance(quantiser, LloydMaxLevels):
            return quantiser.book.read([packed], quantiser.dim)
        return quantiser.decode(unpack(packed, quantiser.bits, quantiser.codes))

    def scores(self, q: mx.array, packed: mx.array, gain: mx.array) -> mx.array:
        if self._scales_rows(q):
            return dots(q, self.decode(packed) * gain)
        return dots(q, self.decode(packed)) * gain.swapaxes(-1, -2)

    def mix(self, weights: mx.array, packed: mx.array, gain: mx.array) -> mx.array:
        if self._scales_rows(weights):
            return sums(weights, self.decode(packed) * gain)
        return sums(weights * gain.swapaxes(-1, -2), self.decode(packed))

    def _scales_rows(self, queries: mx.array) -> bool:
        return queries.shape[2] > self.quantiser.dim
