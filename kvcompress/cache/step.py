"""What one forward step attends to: a snapshot of codes and exact rows."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
from attrs import evolve, frozen

from kvcompress.attention import ExactSegment, Segment, attend, unread_share
from kvcompress.attention.masks import Mask, as_mlx_takes_it, check_mask
from kvcompress.attention.queries import check_queries
from kvcompress.cache.coded import Coded
from kvcompress.cache.received import Witness, received


@frozen(eq=False)
class Asked:
    """What attention was asked of a step.

    Attributes:
        queries: ``(B, Hq, L, D)``.
        scale: Factor on the scores.
        mask: ``None``, ``"causal"`` or an array.
        sinks: ``(Hq,)`` learnt logits, if there are any.
    """

    queries: mx.array
    scale: float
    mask: Mask
    sinks: mx.array | None

    def without_last(self, count: int) -> Asked:
        """The same for all but the last ``count`` tokens, which are no longer there."""
        mask, length = self.mask, self.queries.shape[2]
        if isinstance(mask, mx.array):
            rows = mask.shape[-2] if mask.ndim > 1 else 1
            tokens = mask.shape[-1] - count
            mask = mask[..., : rows - count, :tokens] if rows == length else mask[..., :tokens]
        return evolve(self, queries=self.queries[:, :, : length - count], mask=mask)


class Step:
    """The tokens of one step, as attention reads them or as dense arrays.

    Args:
        coded: The coded tokens.
        keys: Exact keys ``(B, Hkv, n, D)``: sinks, then what follows the coded tokens.
        values: Exact values ``(B, Hkv, n, Dv)``.
        budget: Bytes of transients that attention may hold.
    """

    def __init__(self, coded: Coded, keys: mx.array, values: mx.array, budget: int) -> None:
        self._coded = coded
        self._codec = coded.codec
        self._keys = keys
        self._values = values
        self._budget = budget
        self.settle: list[mx.array] = []  # arrays to be computed with this step's output
        self.witness: Witness | None = None  # wants to know what the first queries attend to

    @property
    def coded(self) -> int:
        """Tokens that are read as codes."""
        return self._coded.tokens

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return int(self._keys.shape[2]) + self.coded

    def _segments(self) -> list[Segment]:
        sinks = self._coded.start
        spans = (range(sinks), range(sinks + self.coded, self.tokens))
        exact = ExactSegment(self._keys, self._values, tuple(s for s in spans if len(s)))
        coded = self._coded.segments()
        return [exact, *coded] if exact.spans else [*coded]

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of this step's queries: ``(B, Hq, L, D)`` to ``(B, Hq, L, Dv)``.

        Without coded tokens this is MLX's own attention on the exact rows, bit for bit what
        the plain cache computes.

        Raises:
            ConfigError: Queries, mask or sinks do not fit the tokens or each other.
        """
        check_queries(self._codec.layer, self._keys.shape[0], queries, sinks)
        if not queries.shape[2]:
            return mx.zeros((*queries.shape[:3], self._values.shape[3]), queries.dtype)
        if not self.coded:
            check_mask(mask, queries.shape, self.tokens)
            out = mx.fast.scaled_dot_product_attention(
                queries,
                self._keys,
                self._values,
                scale=scale,
                mask=as_mlx_takes_it(mask, queries.dtype),
                sinks=None if sinks is None else sinks.astype(queries.dtype),
            ).astype(queries.dtype)
        else:
            out = attend(
                queries,
                self._segments(),
                self._codec,
                self._coded.constants,
                scale=scale,
                mask=mask,
                sinks=sinks,
                budget=self._budget,
            )
        self.testify(Asked(queries, scale, mask, sinks))
        return self._settled(out)

    def testify(self, asked: Asked) -> None:
        """Tell the witness, once, what the queries attend to; if there is one."""
        witness, self.witness = self.witness, None
        if witness is None:
            return
        given = received(
            asked.queries,
            self._keys,
            self.coded,
            window=witness.window,
            sinks=witness.sinks,
            scale=asked.scale,
            mask=asked.mask,
            logits=asked.sinks,
            budget=self._budget,
        )
        self.settle = witness.tell(given) or self.settle

    def unread_share(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """The share of softmax weight that :meth:`attend` does not read, ``(B, Hq, L)``."""
        check_queries(self._codec.layer, self._keys.shape[0], queries, sinks)
        if not self.coded or not queries.shape[2]:
            return mx.zeros(queries.shape[:3])
        return unread_share(
            queries,
            self._segments(),
            self._codec,
            scale=scale,
            mask=mask,
            sinks=sinks,
            budget=self._budget,
        )

    def _settled(self, out: mx.array) -> mx.array:
        """Tie what the cache stores to the output, so that no layer's chunk outlives its layer."""
        if not self.settle:
            return out
        tied: list[mx.array] = mx.depends([out], self.settle)
        return tied[0]

    @cached_property
    def dense(self) -> tuple[mx.array, mx.array]:
        """All tokens as arrays, lazily: ``(B, Hkv, T, D)`` and ``(B, Hkv, T, Dv)``."""
        if not self.coded:
            keys, values = self._keys, self._values
        else:
            decoded_keys, decoded_values = self._coded.decoded()
            keys = self._weave(self._keys, decoded_keys)
            values = self._weave(self._values, decoded_values)
        return self._settled(keys), self._settled(values)

    def _weave(self, exact: mx.array, decoded: mx.array) -> mx.array:
        cut = self._coded.start
        return mx.concatenate([exact[:, :, :cut], decoded, exact[:, :, cut:]], axis=2)
