"""Windowed RoPE: far keys stay un-rotated, and the query bears a rotation for all of them."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
from attrs import frozen

from kvcompress.layers import Rotary
from kvcompress.stages.bands import Band, band_of_tokens, bands_between, mean_rotations
from kvcompress.stages.base import BandCoder, Coder, Fields, Transform
from kvcompress.stages.pairs import turn_pairs
from kvcompress.stages.rope import Queries, Unrotated

_TOGETHER = 64  # positions of queries


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
        if len(places) == 1 and isinstance(coder, BandCoder):
            band = band_of_tokens(bands, places.start, positions)
            whole = coder.band_scores(q, fields, band)
            if whole is not None and of_mean is not None:
                whole = whole + mx.take(of_mean.squeeze(-1).swapaxes(2, 3), band, axis=-1)
            if whole is not None:
                return whole
        parts: list[_Part] = []
        for place, (start, stop) in enumerate(bands):
            begin = max(0, places.start - stop + 1 - positions.start)
            end = min(len(positions), places.stop - start - positions.start)
            few = {name: a[:, :, begin:end] for name, a in fields.items()}
            scores = coder.scores(q[:, :, place], few)
            if of_mean is not None:
                scores = scores + of_mean[:, :, place]
            parts.append(_Part(start, stop, begin, end, scores))
        return _joined(parts, places, positions)

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


def _joined(parts: list[_Part], places: range, positions: range) -> mx.array:
    """Scores of all tokens: from the only band that holds a token, or from each query's own."""
    if len(parts) == 1:
        return parts[0].scores
    cuts = sorted({0, len(positions), *(p.begin for p in parts), *(p.end for p in parts)})
    out = []
    for first, last in pairwise(cuts):
        here = [part for part in parts if part.begin <= first and last <= part.end]
        scores = here[0].over(first, last)
        for part in here[1:]:
            holds = part.holds(places, positions[first:last])
            rows = scores.shape[2] // len(places)
            scores = mx.where(mx.tile(holds, (rows, 1)), part.over(first, last), scores)
        out.append(scores)
    return mx.concatenate(out, axis=-1)
