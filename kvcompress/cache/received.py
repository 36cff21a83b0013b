"""Which tokens are worth a careful assignment: those that were attended to while they were exact.

A token is judged by the queries at its own and the next ``window`` positions, which find it exact
however the tokens arrive. Their softmax runs over what is exact for certain: the sinks and the
``window`` tokens before the query. Coded tokens are left out of it, because which ones are coded
when a query comes depends on the chunk it comes in. So the choice does not, but for round-off.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from attrs import frozen

from kvcompress.attention import share_of
from kvcompress.attention.exponential import exponential
from kvcompress.attention.masks import Mask, apply_mask, check_mask, segment_mask

_QUERIES = 128  # of a tile; more would meet mostly tokens outside their windows
_SCORE_COPIES = 6  # scores, weights and temporaries that live at once
_LEAST = 1e-30  # of a sum of weights that is divided by


@frozen(eq=False)
class Witness:
    """Tells a cache what its exact tokens received from a step's queries.

    Attributes:
        window: How far behind a query the tokens are that it judges.
        sinks: First tokens, which are always exact.
        tell: Takes ``(B, n)`` float32, for each exact row of the step; gives the arrays that are to
            be computed with the step's output.
    """

    window: int
    sinks: int
    tell: Callable[[mx.array], list[mx.array]]


def received(
    queries: mx.array,
    keys: mx.array,
    coded: int,
    *,
    window: int,
    sinks: int,
    scale: float,
    mask: Mask = None,
    logits: mx.array | None = None,
    budget: int,
) -> mx.array:
    """Softmax weight that exact tokens receive, summed over a step's queries and all query heads.

    Args:
        queries: ``(B, Hq, L, D)``, the last of the sequence.
        keys: ``(B, Hkv, n, D)``, the exact rows: sinks, then what follows the coded tokens.
        coded: How many tokens are coded.
        window: How far behind a query the tokens are that it judges.
        sinks: First tokens, which share every softmax.
        scale: Factor on the scores.
        mask: As attention takes it.
        logits: ``(Hq,)`` learnt logits that take weight.
        budget: Bytes of transients.

    Returns:
        ``(B, n)`` float32; zero for a token that no query sees.

    Raises:
        ConfigError: Where the mask does not fit.
    """
    B, Hq, L, _ = queries.shape
    n = keys.shape[2]
    check_mask(mask, queries.shape, n + coded)
    window = min(window, n + coded)  # positions are 32-bit integers to MLX
    out: mx.array | None = None
    size = _tile(B * Hq, window + min(sinks, n), budget)
    for start in range(0, L, size):
        stop = min(start + size, L)
        few = queries[:, :, start:stop]
        if out is not None:
            few = mx.depends([few], [out])[0]
        band = _Band.of(coded + n - L, range(start, stop), coded, window, min(sinks, n))
        if not band.recent:
            continue
        weights = band.weights(few, keys, scale, _cut(mask, start, stop, L), logits, n + coded)
        given = weights.sum(axis=(1, 2, 3))[:, band.first :]
        rows = band.recent.start - coded
        given = mx.pad(given, [(0, 0), (rows, n - rows - given.shape[1])])
        out = given if out is None else out + given
    return mx.zeros((B, n)) if out is None else out


def _tile(rows: int, width: int, budget: int) -> int:
    size = _QUERIES
    while size > 1 and rows * size * (size + width) * 4 * _SCORE_COPIES > budget:
        size //= 2
    return size


def _cut(mask: Mask, start: int, stop: int, length: int) -> mx.array | None:
    """An array's rows of some queries; causality is seen to anyway."""
    if not isinstance(mask, mx.array):
        return None
    rows = mask.ndim > 1 and mask.shape[-2] == length
    return mask[..., start:stop, :] if rows else mask


@frozen
class _Band:
    """The queries of a tile, and the tokens that are exact for them in any case.

    Attributes:
        places: Positions of the queries.
        first: How many sinks are apart from the others.
        recent: Positions of the others.
        coded: Tokens that are coded, so stored elsewhere.
        window: How far behind a query it sees.
    """

    places: range
    first: int
    recent: range
    coded: int
    window: int

    @classmethod
    def of(cls, origin: int, queries: range, coded: int, window: int, sinks: int) -> _Band:
        places = range(origin + queries.start, origin + queries.stop)
        lowest = max(places.start - window, sinks + coded if coded else sinks)
        recent = range(min(lowest, places.stop), places.stop)
        return cls(places, sinks, recent, coded, window)

    def weights(
        self,
        queries: mx.array,
        keys: mx.array,
        scale: float,
        mask: mx.array | None,
        logits: mx.array | None,
        tokens: int,
    ) -> mx.array:
        """``(B, Hkv, G, t, first + recent)`` float32."""
        B, Hq, t, D = queries.shape
        Hkv = keys.shape[1]
        near = keys[:, :, self.recent.start - self.coded : self.recent.stop - self.coded]
        if self.first:
            near = mx.concatenate([keys[:, :, : self.first], near], axis=2)
        q = (queries.astype(mx.float32) * scale).reshape(B, Hkv, Hq // Hkv * t, D)
        scores = (q @ near.astype(mx.float32).swapaxes(-1, -2)).reshape(B, Hkv, Hq // Hkv, t, -1)
        spans = (range(self.first), self.recent) if self.first else (self.recent,)
        masks = [self._seen() if t > 1 else None, segment_mask(mask, spans, t, tokens)]
        for hidden in masks:
            scores = apply_mask(scores, hidden)
        peak = scores.max(axis=-1, keepdims=True)
        extra: mx.array | None = None
        if logits is not None:
            extra = logits.astype(mx.float32).reshape(1, Hkv, -1, 1, 1)
            peak = mx.maximum(peak, extra)
        weights = exponential(scores - peak)
        if any(hidden is not None for hidden in masks):
            weights = mx.where(scores > mx.finfo(mx.float32).min, weights, 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        if extra is not None:
            total = total + exponential(extra - peak)
        return weights / mx.maximum(total, _LEAST)

    def _seen(self) -> mx.array:
        """``(t, first + recent)``: the sinks, and what is at most ``window`` behind.

        All is true of one query alone.
        """
        queries = mx.arange(self.places.start, self.places.stop)[:, None]
        recent = mx.arange(self.recent.start, self.recent.stop)
        near = (recent <= queries) & (recent >= queries - self.window)
        if not self.first:
            return near
        return mx.concatenate([mx.arange(self.first) <= queries, near], axis=1)


def chosen(
    weights: mx.array, importance: mx.array, done: int, block: int, fraction: float
) -> mx.array:
    """The tokens of each block that get the careful assignment.

    Those that received most; among those that received nothing, as where no queries were seen,
    the most important. Ties go to the earlier token.

    Args:
        weights: ``(B, T)`` float32, what tokens received that are coded now.
        importance: ``(B, T)`` float32.
        done: How many tokens were coded before them.
        block: Tokens of a block; blocks are counted from the first coded token.
        fraction: How many of a block are chosen, rounded up.

    Returns:
        ``(B, T)`` bool.
    """
    B, T = weights.shape
    front = done % block  # where a trim cut a block, the rest of its share is chosen
    back = -(front + T) % block
    first, second = (
        mx.pad(x, [(0, 0), (front, back)], constant_values=-1.0).reshape(B, -1, block)
        for x in (weights, importance)
    )
    place = mx.arange(block)
    earlier = place[None] < place[:, None]
    tie = _equal(second) & earlier | _greater(second)
    ahead = (_greater(first) | _equal(first) & tie).sum(axis=-1)
    counts = [
        retrieved(min(start + block, done + T), block, fraction)
        - retrieved(max(start, done), block, fraction)
        for start in range(done - front, done + T, block)
    ]
    marks = ahead < mx.array(counts)[:, None]
    return marks.reshape(B, -1)[:, front : front + T]


def _greater(x: mx.array) -> mx.array:
    """``(..., n)`` to ``(..., n, n)``: whether the second is greater than the first."""
    return x[..., None, :] > x[..., :, None]


def _equal(x: mx.array) -> mx.array:
    return x[..., None, :] == x[..., :, None]


def retrieved(coded: int, block: int, fraction: float) -> int:
    """How many of the first ``coded`` tokens got the careful assignment.

    Exact for whole blocks. Of a block that a trim has cut, its share.
    """
    whole, rest = divmod(coded, block)
    return whole * share_of(block, fraction) + share_of(rest, fraction)
