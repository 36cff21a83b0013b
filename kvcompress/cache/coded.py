"""The coded tokens of a sequence, as one step reads them."""

from __future__ import annotations

import mlx.core as mx
from attrs import frozen

from kvcompress.attention import CodedSegment
from kvcompress.cache.promise import Promise
from kvcompress.codec import Codes, KVCodec
from kvcompress.stages.base import Fields


@frozen(eq=False)
class Coded:
    """What is coded at some time.

    Attributes:
        codec: The layer's codec.
        runs: Runs of codes with their numbers of tokens, oldest first.
        constants: What the sequence keeps once.
        start: Tokens before the first coded one.
        promise: The decoded tokens, which other steps that read the same codes share.
    """

    codec: KVCodec
    runs: list[tuple[dict[str, mx.array], int]]
    constants: Fields
    start: int
    promise: Promise

    @property
    def tokens(self) -> int:
        """Coded tokens."""
        return sum(count for _, count in self.runs)

    def segments(self) -> list[CodedSegment]:
        """The runs, as attention reads them."""
        self.promise.read_as_codes = True
        out, start = [], self.start
        for fields, count in self.runs:
            span = range(start, start + count)
            codes = Codes(dict(fields), dict(self.constants))
            out.append(CodedSegment(self.codec, codes, (span,), span))
            start += count
        return out

    def decoded(self) -> tuple[mx.array, mx.array]:
        """Keys ``(B, Hkv, n, D)`` and values ``(B, Hkv, n, Dv)``, not computed yet.

        All runs as one: their decoding is one graph, however long the sequence.
        """
        if self.promise.arrays is None:
            runs = [fields for fields, _ in self.runs]
            whole = runs[0]
            if len(runs) > 1:
                whole = {k: mx.concatenate([fields[k] for fields in runs], axis=2) for k in whole}
            span = range(self.start, self.start + self.tokens)
            codes = Codes(dict(whole), dict(self.constants))
            self.promise.arrays = self.codec.decode(codes, span)
        return self.promise.arrays
