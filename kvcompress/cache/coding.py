"""Turning exact rows into codes, a bounded number at a time."""

from __future__ import annotations

import mlx.core as mx
from attrs import frozen

from kvcompress.cache.received import chosen
from kvcompress.cache.store import CodeStore, ExactRows
from kvcompress.codec import KVCodec

_TOKENS = 2048  # coded at once; bounds what encoding holds


@frozen(eq=False)
class Coding:
    """How a cache codes.

    Attributes:
        codec: The layer's codec.
        sinks: First tokens, which stay exact.
        block: Tokens coded at a time.
        steady: Exact rows held between steps of a long sequence.
    """

    codec: KVCodec
    sinks: int
    block: int
    steady: int

    def code(
        self,
        exact: ExactRows,
        store: CodeStore,
        constants: dict[str, mx.array],
        keys: mx.array,
        values: mx.array,
        target: int,
    ) -> dict[str, mx.array]:
        """Code the rows after the sinks until ``target`` tokens are coded; keep the others.

        Args:
            exact: Holds the others from then on.
            store: Takes the codes.
            constants: What the sequence keeps once; from these tokens if none is coded yet.
            keys: All exact rows, ``(B, Hkv, n, D)``.
            values: ``(B, Hkv, n, Dv)``.
            target: Tokens to be coded in all.

        Returns:
            The constants.
        """
        first, done, weights = self.sinks, store.tokens, exact.received
        start, stop = first, first + target - done
        if not done:
            warm = slice(start, start + max(self.codec.warmup, 1))
            constants = self.codec.begin(
                keys[:, :, warm], values[:, :, warm], range(first, first + warm.stop - warm.start)
            )
        # Where tokens of a block are chosen among, no piece ends within one.
        choosing = weights is not None and self.block > 1
        before = done % self.block if choosing else 0
        for edge in range(start - before, stop, _TOKENS):
            begin, end = max(edge, start), min(edge + _TOKENS, stop)
            part, position = keys[:, :, begin:end], first + done + begin - start
            places = range(position, position + end - begin)
            marks = None
            if weights is not None and choosing:
                marks = chosen(
                    weights[:, 0, begin:end, 0],
                    self.codec.importance(part, places, constants),
                    store.tokens,
                    self.block,
                    self.codec.careful_fraction,
                )
            codes = self.codec.encode(part, values[:, :, begin:end], places, constants, marks)
            store.append(codes.fields, end - begin)
        exact.replace(_without(keys, start, stop), _without(values, start, stop), self.steady)
        if weights is not None:
            exact.received = _without(weights, start, stop)
        return constants


def _without(x: mx.array, start: int, stop: int) -> mx.array:
    """Rows of the token axis outside ``start:stop``."""
    if start == 0:
        return x[:, :, stop:]
    return mx.concatenate([x[:, :, :start], x[:, :, stop:]], axis=2)
