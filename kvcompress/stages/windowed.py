"""Windowed RoPE: far keys stay un-rotated, and the query bears a rotation for all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeGuard

import mlx.core as mx
from attrs import frozen

from kvcompress.layers import Rotary
from kvcompress.stages.bands import Band, band_of_tokens, bands_between, mean_rotations
from kvcompress.stages.base import BandCoder, Coder, Fields, Transform
from kvcompress.stages.pairs import turn_pairs
from kvcompress.stages.rope import Queries, Unrotated

_TOGETHER = 64  # positions of queries
_NEAR = 400  # tokens of short bands, for which tables cost more than to decode them for all
_LAUNCHES = 2_000_000  # multiplications in the time that a band's operations take to start


@frozen
class WindowedRope(Unrotated):
    """A2ATS Eq. 11 and 12: far keys stay un-rotated, the query bears a rotation for all of them.

    The far zone is split into bands of distance ``i - j`` that grow by ``growth``, and in each
    the query bears the *mean* rotation over its distances, ``c_l = mean exp(i d theta_l)``: the
    least-squares constant, which shrinks pairs that turn fast instead of giving them an
    arbitrary phase. The mean of the keys is turned as the rest of them is: scored at its true
    rotation beside shrunken codes it no longer cancels against them, and a real model errs up to
    three times as much. ``constant`` gives the paper's form: one rotation ``R_b`` for every
    distance.

    Attributes:
        first: Distance at which the first band begins.
        growth: Ratio of a band's ends, above 1.
        constant: The distance ``b`` that stands for all, or ``None`` for bands.
    """

    first: int = 64
    growth: float = 2.0
    constant: int | None = None

    def queries(
        self, raw: mx.array, transform: Transform, rotary: Rotary | None, positions: range
    ) -> Queries:
        """Turn each query back to position 0."""
        if rotary is None:
            return Queries(raw, raw, positions)
        B, H, M, D = raw.shape
        turned = rotary.unrotate(raw.reshape(B, -1, len(positions), D), positions)
        return Queries(raw, turned.reshape(B, H, M, D), positions)

    def bands(self, low: int, high: int) -> tuple[Band, ...]:
        """Bands ``[start, stop)`` of distance that meet ``[low, high)``."""
        if self.constant is not None:
            return ((low, high),)
        return bands_between(self.first, self.growth, low, high)

    def scores(
        self,
        queries: Queries,
        fields: Fields,
        mean: mx.array | None,
        positions: range,
        *,
        coder: Coder,
        transform: Transform,
        rotary: Rotary | None,
    ) -> mx.array:
        """One rotated query a band; where a chunk's queries put a token in several, each its own.

        A single position puts every token in one band, and a coder may score them all at once.
        Every band is scored over the tokens that are in it for some query, no more. So a chunk's
        queries are taken a few positions at a time: bands then overlap by so few tokens.
        """
        places = queries.positions
        if self.constant is None and len(places) > _TOGETHER:
            B, H, M, _ = queries.raw.shape
            pieces = []
            for first in range(0, len(places), _TOGETHER):
                part = queries.part(first, min(first + _TOGETHER, len(places)))
                scores = self.scores(
                    part, fields, mean, positions, coder=coder, transform=transform, rotary=rotary
                )
                pieces.append(scores.reshape(B, H, -1, len(part.positions), len(positions)))
            return mx.concatenate(pieces, axis=3).reshape(B, H, M, -1)
        low, high = max(0, places.start - positions.stop + 1), places.stop - positions.start
        bands = ((low, high),) if rotary is None else self.bands(low, high)
        turned = self._turned(queries.mapped, rotary, bands)
        B, H, n, M, D = turned.shape
        q = transform.query(turned.flatten(2, 3)).reshape(B, H, n, M, D)
        of_mean = None if mean is None else turned @ mean[..., None]
        if len(places) == 1:
            band = band_of_tokens(bands, places.start, positions)
            scores = _of_one(q, fields, band, _spans(bands, places, positions), coder)
            if of_mean is None:
                return scores
            return scores + mx.take(of_mean.squeeze(-1).swapaxes(2, 3), band, axis=-1)
        parts: list[_Part] = []
        spans = _spans(bands, places, positions)
        for place, ((start, stop), (begin, end)) in enumerate(zip(bands, spans, strict=True)):
            if begin >= end:
                continue
            scores = coder.scores(q[:, :, place], _cut(fields, begin, end))
            if of_mean is not None:
                scores = scores + of_mean[:, :, place]
            parts.append(_Part(start, stop, begin, end, scores))
        return _joined(parts, places, positions, queries.raw.shape[:3])

    def _turned(self, q: mx.array, rotary: Rotary | None, bands: tuple[Band, ...]) -> mx.array:
        """The queries ``(B, H, M, D)`` as each band meets them, ``(B, H, n, M, D)``."""
        if rotary is None:
            return q[:, :, None]
        if self.constant is not None:
            B, H, M, D = q.shape
            place = range(self.constant, self.constant + 1)
            return rotary.rotate(q.reshape(B, H * M, 1, D), place).reshape(B, H, 1, M, D)
        real, imaginary = mean_rotations(rotary, bands)
        return turn_pairs(q[:, :, None], rotary, real[:, None], imaginary[:, None])


def _spans(bands: tuple[Band, ...], places: range, positions: range) -> list[tuple[int, int]]:
    """The tokens of a run ``[begin, end)`` that are in each band for some query."""
    return [
        (
            max(0, places.start - stop + 1 - positions.start),
            min(len(positions), places.stop - start - positions.start),
        )
        for start, stop in bands
    ]


def _of_one(
    q: mx.array, fields: Fields, band: mx.array, spans: list[tuple[int, int]], coder: Coder
) -> mx.array:
    """Scores of one position's queries, to whom every token is in one band: ``(B, H, M, T)``."""
    B, H, _, M, D = q.shape

    def together(first: int, last: int) -> mx.array:
        """All queries of some bands meet all their tokens, and each token keeps its own."""
        begin, end = spans[last - 1][0], spans[first][1]
        scores = coder.scores(q[:, :, first:last].flatten(2, 3), _cut(fields, begin, end))
        if last - first == 1:
            return scores
        own = (band[begin:end] - first).reshape(1, 1, 1, 1, -1)
        every = scores.reshape(B, H, -1, M, end - begin)
        return mx.take_along_axis(every, own, axis=2).squeeze(2)

    parts: list[mx.array] = []
    first = _within(spans, 0, _NEAR)
    if first > 1:
        parts.append(together(0, first))
    else:
        first = 0
    if first < len(spans) and _scores_bands(coder):
        end = spans[first][1]
        far = coder.band_scores(q[:, :, first:], _cut(fields, 0, end), band[:end] - first)
        if far is not None:
            parts.append(far)
            first = len(spans)
    while first < len(spans):
        last = max(first + 1, _within(spans, first, _LAUNCHES // (B * H * M * D)))
        parts.append(together(first, last))
        first = last
    return parts[0] if len(parts) == 1 else mx.concatenate(parts[::-1], axis=-1)


def _cut(fields: Fields, begin: int, end: int) -> Fields:
    """Those of the tokens ``[begin, end)``."""
    return {name: a[:, :, begin:end] for name, a in fields.items()}


def _scores_bands(coder: Coder) -> TypeGuard[BandCoder]:
    # ``isinstance`` would look every member of the protocol up, at each layer of each step.
    return hasattr(coder, "band_scores")


def _within(spans: list[tuple[int, int]], first: int, most: int) -> int:
    """The end of the bands from ``first`` on that hold no more than ``most`` tokens together."""
    last = first
    while last < len(spans) and spans[first][1] - spans[last][0] <= most:
        last += 1
    return last


@frozen(eq=False)
class _Part:
    """Scores of the band ``[start, stop)`` over the tokens ``[begin, end)`` of a run."""

    start: int
    stop: int
    begin: int
    end: int
    scores: mx.array

    def over(self, first: int, last: int) -> mx.array:
        return self.scores[..., first - self.begin : last - self.begin]

    def holds(self, places: range, positions: range) -> mx.array:
        """``(L, T)``: whether ``i - j`` lies in the band."""
        distance = mx.arange(places.start, places.stop)[:, None] - mx.arange(
            positions.start, positions.stop
        )
        return (distance >= self.start) & (distance < self.stop)


def _joined(parts: list[_Part], places: range, positions: range, rows: tuple[int, ...]) -> mx.array:
    """Scores of all tokens: from the only band that holds a token, or from each query's own.

    Tokens after the last query, which no band holds and a mask hides, score zero.

    Args:
        parts: The bands that hold tokens.
        places: Positions of the queries.
        positions: The ``T`` positions of the tokens.
        rows: ``(B, H, M)``.

    Returns:
        ``(B, H, M, T)``.
    """
    cuts = sorted({0, len(positions), *(p.begin for p in parts), *(p.end for p in parts)})
    out = []
    for first, last in pairwise(cuts):
        here = [part for part in parts if part.begin <= first and last <= part.end]
        if not here:
            out.append(mx.zeros((*rows, last - first)))
            continue
        scores = here[0].over(first, last)
        for part in here[1:]:
            holds = part.holds(places, positions[first:last])
            group = rows[2] // len(places)
            scores = mx.where(mx.tile(holds, (group, 1)), part.over(first, last), scores)
        out.append(scores)
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=-1)
