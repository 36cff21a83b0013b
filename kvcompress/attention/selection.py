"""Reading a part of the coded tokens: A2ATS's retrieval, for any codec.

Every token's score is computed, which costs little from codes; values are decoded and summed only
for the ``ceil(fraction * coded)`` tokens that take the largest share of a softmax. Exact tokens are
always read.

The share is that of the row, among a KV head's ``G * L`` rows, in whose softmax the token weighs
most, so that its codes are fetched once for the whole group. Not that of the row with the largest
score: a constant in all scores of a row, which the softmax does not see, would then decide which
head chooses. The choice is over all coded tokens together, wherever tiles and blocks end.

The weight of what is not read is known. Its value is taken for the mean of the coded values, the
codec's centre, which costs nothing. In a trial on recorded attention that erred least at every
fraction; next came to leave the rest out and renormalise, which a codec without a centre does; then
the plain mean of what is read; worst was no value at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
from attrs import frozen

from kvcompress.attention.exponential import exponential
from kvcompress.attention.masks import Mask
from kvcompress.attention.rows import DEFAULT_BUDGET, Rows, tile_size, tiles
from kvcompress.attention.running import Running, begun, raised
from kvcompress.attention.segments import CodedSegment, Segment
from kvcompress.codec import Codes, KVCodec

MOST_QUERIES = 8
"""Queries of a step that reads a part; longer chunks, whose queries want other tokens, read all."""

_RUN = 4096  # tokens decoded at a time
_LEAST = 1e-30  # of a sum of weights that is divided by


def share_of(count: int, fraction: float) -> int:
    """``ceil(fraction * count)``, unless round-off alone lifts the product above a whole number."""
    return math.ceil(round(fraction * count, 9))


def selects(codec: KVCodec, segments: Sequence[Segment], length: int) -> bool:
    """Whether a step of ``length`` queries leaves coded tokens out."""
    coded = _coded(segments)
    return length <= MOST_QUERIES and share_of(coded, codec.attend_fraction) < coded


@frozen(eq=False)
class Selected:
    """Attention that has read a part.

    Attributes:
        run: The softmax over all tokens, with the values of those that were read.
        unread: ``(B, Hkv, M, 1)``, the share of the softmax's weight that was not.
    """

    run: Running
    unread: mx.array


@frozen(eq=False)
class _Part:
    """Coded tokens, for every KV head its own.

    Attributes:
        ranks: ``(B, Hkv, n)``, logarithms of shares; minus infinity where no row sees the token.
        scores: ``(B, Hkv, M, n)``.
        values: The value fields, ``(B, Hkv, n, width)`` or one head for all.
    """

    ranks: mx.array
    scores: mx.array
    values: dict[str, mx.array]


def unread_share(
    queries: mx.array,
    segments: Sequence[Segment],
    codec: KVCodec,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    budget: int = DEFAULT_BUDGET,
) -> mx.array:
    """The share of each query's softmax weight that :func:`kvcompress.attention.attend` estimates.

    Arguments are those of ``attend``.

    Returns:
        ``(B, Hq, L)`` float32 from 0 to 1; zeros where every token is read.
    """
    B, Hq, L, _ = queries.shape
    rows = Rows.of(queries, segments, codec, scale, mask)
    if not selects(codec, segments, L):
        return mx.zeros((B, Hq, L))
    run = None if sinks is None else begun(sinks, queries, codec.layer.kv_heads)
    groups = list(tiles(segments, tile_size(queries, codec, budget)))
    return selected(rows, groups, codec, run).unread.reshape(B, Hq, L)


def selected(
    rows: Rows, groups: list[list[Segment]], codec: KVCodec, run: Running | None
) -> Selected:
    """Read the tokens of all tiles, coded ones in part.

    Scores are computed twice where there are several tiles: the softmax of all must be known
    before the first token is chosen.
    """
    run, scores = _weighed(rows, groups, run)
    if run.mass is None:
        raise ValueError("there are no coded tokens to select from")
    count = share_of(sum(_coded(group) for group in groups), codec.attend_fraction)
    everything = run.peak + mx.log(run.total + run.mass)
    parts: list[_Part] = []
    for group in groups:
        if scores is None:
            rows = rows.after([everything, *(part.scores for part in parts)])
        for place, segment in enumerate(group):
            if isinstance(segment, CodedSegment):
                own = rows.scores(segment) if scores is None else scores[place]
                parts.append(_Part(_ranks(own, everything, rows), own, _values(segment)))
        parts = [_best(parts, count)] if parts else []
    return _read(run, parts[0], codec)


def _coded(segments: Sequence[Segment]) -> int:
    return sum(len(span) for s in segments if s.coded for span in s.spans)


def _weighed(
    rows: Rows, groups: list[list[Segment]], run: Running | None
) -> tuple[Running, list[mx.array] | None]:
    """The softmax with exact values and the weights of coded tokens; one tile's scores."""
    scores: list[mx.array] = []
    for group in groups:
        if run is not None:
            rows = rows.after(run.arrays())
        scores = [rows.scores(segment) for segment in group]
        run = raised(run, scores)
        for segment, s in zip(group, scores, strict=True):
            weights = exponential(s - run.peak)
            if segment.coded:
                run.weigh(weights)
            else:
                run.add(segment, weights)
    if run is None:
        raise ValueError("there are no tokens to attend to")
    return run, scores if len(groups) == 1 else None


def _ranks(scores: mx.array, everything: mx.array, rows: Rows) -> mx.array:
    shares = scores - everything
    if isinstance(rows.mask, mx.array):
        # A row that sees nothing gives every token a share: it must not choose.
        shares = mx.where(scores > mx.finfo(mx.float32).min, shares, -mx.inf)
    return shares.max(axis=2)


def _values(segment: CodedSegment) -> dict[str, mx.array]:
    return {k: a for k, a in segment.codes.fields.items() if k.startswith("v.")}


def _best(parts: list[_Part], count: int) -> _Part:
    """The ``count`` tokens of the highest rank, or all there are."""
    ranks = mx.concatenate([part.ranks for part in parts], axis=-1)
    scores = mx.concatenate([part.scores for part in parts], axis=-1)
    values = {k: _joined([part.values[k] for part in parts]) for k in parts[0].values}
    if ranks.shape[-1] <= count:
        return _Part(ranks, scores, values)
    places = mx.argpartition(-ranks, count - 1, axis=-1)[..., :count]
    return _Part(
        mx.take_along_axis(ranks, places, axis=-1),
        mx.take_along_axis(scores, places[:, :, None], axis=-1),
        {k: _rows_of(a, places) for k, a in values.items()},
    )


def _joined(parts: list[mx.array]) -> mx.array:
    """One array along the tokens; what heads share is spread where others have chosen already."""
    heads = max(a.shape[1] for a in parts)
    spread = [mx.broadcast_to(a, (a.shape[0], heads, *a.shape[2:])) for a in parts]
    return spread[0] if len(parts) == 1 else mx.concatenate(spread, axis=2)


def _rows_of(array: mx.array, places: mx.array) -> mx.array:
    """``(B, H or 1, n, width)`` at ``(B, H, k)``: ``(B, H, k, width)``."""
    B, heads, n, width = array.shape
    starts = mx.arange(0, B * heads * n, n, dtype=mx.uint32).reshape(B, heads, 1)
    return mx.take(array.reshape(B * heads * n, width), places + starts, axis=0)


def _read(run: Running, part: _Part, codec: KVCodec) -> Selected:
    """Decode and sum the selected values, and let something stand for the others."""
    weights = exponential(part.scores - run.peak)
    mixed: mx.array | None = None
    for start in range(0, weights.shape[-1], _RUN):
        few = weights[..., start : start + _RUN]
        if mixed is not None:
            few = mx.depends([few], [mixed])[0]
        values = {k: a[:, :, start : start + _RUN] for k, a in part.values.items()}
        out = codec.mix(few, Codes(values, {}))
        mixed = out if mixed is None else mixed + out
    run.mixed = mixed
    read = weights.sum(axis=-1, keepdims=True)
    mass = read if run.mass is None else run.mass
    unread = mx.maximum(mass - read, 0) / mx.maximum(run.total + mass, _LEAST)
    if not codec.values.centre.active:
        run.mass = read
        run.total = mx.maximum(run.total + read, _LEAST)
    else:
        run.total = run.total + mass
    return Selected(run, unread)
