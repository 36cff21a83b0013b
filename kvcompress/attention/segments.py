"""Runs of tokens that attention reads in the same way: exact rows, or codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import mlx.core as mx
from attrs import frozen

from kvcompress.codec import Codes, KVCodec
from kvcompress.stages.rope import Queries


class Segment(Protocol):
    """Tokens whose scores and weighted values can be computed from what is stored."""

    @property
    def spans(self) -> tuple[range, ...]:
        """Places of the tokens in the sequence, in order."""
        ...

    @property
    def coded(self) -> bool:
        """Whether :meth:`mix` gives sums in code space."""
        ...

    def scores(self, queries: Queries) -> mx.array:
        """``(B, Hkv, M, n)`` float32."""
        ...

    def mix(self, weights: mx.array) -> mx.array:
        """``(B, Hkv, M, n)`` weights to ``(B, Hkv, M, Dv)`` float32."""
        ...

    def split(self, size: int) -> Iterator[Segment]:
        """The same tokens in runs of at most ``size``."""
        ...


def _tokens(spans: tuple[range, ...]) -> int:
    return sum(len(span) for span in spans)


def _cut(spans: tuple[range, ...], start: int, stop: int) -> tuple[range, ...]:
    """Places of the tokens ``start`` to ``stop`` of a segment."""
    out, before = [], 0
    for span in spans:
        part = span[max(0, start - before) : max(0, stop - before)]
        if len(part):
            out.append(part)
        before += len(span)
    return tuple(out)


@frozen(eq=False)
class ExactSegment:
    """Tokens kept as they came: ``(B, Hkv, n, D)`` and ``(B, Hkv, n, Dv)``."""

    keys: mx.array
    values: mx.array
    spans: tuple[range, ...]
    coded: bool = False

    def scores(self, queries: Queries) -> mx.array:
        """``q . k``."""
        return queries.raw @ self.keys.astype(mx.float32).swapaxes(-1, -2)

    def mix(self, weights: mx.array) -> mx.array:
        """``p @ v``."""
        return weights @ self.values.astype(mx.float32)

    def split(self, size: int) -> Iterator[Segment]:
        """Slices of at most ``size`` tokens."""
        for start in range(0, _tokens(self.spans), size):
            stop = min(start + size, _tokens(self.spans))
            yield ExactSegment(
                self.keys[:, :, start:stop],
                self.values[:, :, start:stop],
                _cut(self.spans, start, stop),
            )


@frozen(eq=False)
class CodedSegment:
    """Tokens kept as codes; ``positions`` are those their keys were rotated to."""

    codec: KVCodec
    codes: Codes
    spans: tuple[range, ...]
    positions: range
    coded: bool = True

    def scores(self, queries: Queries) -> mx.array:
        """``q . k`` from the codes."""
        return self.codec.scores(queries, self.codes, self.positions)

    def mix(self, weights: mx.array) -> mx.array:
        """Weighted sum in code space."""
        return self.codec.mix(weights, self.codes)

    def split(self, size: int) -> Iterator[Segment]:
        """Slices of at most ``size`` tokens."""
        total = len(self.positions)
        for start in range(0, total, size):
            stop = min(start + size, total)
            fields = {k: a[:, :, start:stop] for k, a in self.codes.fields.items()}
            yield CodedSegment(
                self.codec,
                Codes(fields, self.codes.constants),
                _cut(self.spans, start, stop),
                self.positions[start:stop],
            )
