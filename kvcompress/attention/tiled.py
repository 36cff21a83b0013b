"""Exact attention over segments in bounded memory: online softmax, merged by log-sum-exp.

The transient of a step is a few score matrices of one tile, whatever the length of the
sequence. Tiles are chained with ``mx.depends``: without it the lazy graph would hold every
tile's scores at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
from attrs import define

from kvcompress.attention.exponential import exponential
from kvcompress.attention.masks import Mask, apply_mask, check_mask, segment_mask
from kvcompress.attention.segments import Segment
from kvcompress.codec import KVCodec
from kvcompress.stages.base import Fields
from kvcompress.stages.rope import Queries

DEFAULT_BUDGET = 64 << 20  # bytes of transients a step may hold
_SCORE_COPIES = 6  # scores, weights and elementwise temporaries that live at once, measured


@define
class _Running:
    """The softmax so far: row maximum, sum of weights, and weighted values in two spaces."""

    peak: mx.array  # (B, Hkv, M, 1)
    total: mx.array  # (B, Hkv, M, 1)
    exact: mx.array | None = None  # (B, Hkv, M, Dv), value space
    mixed: mx.array | None = None  # (B, Hkv, M, Dv), code space
    mass: mx.array | None = None  # (B, Hkv, M, 1), weight that went into ``mixed``

    def arrays(self) -> list[mx.array]:
        parts = (self.peak, self.total, self.exact, self.mixed, self.mass)
        return [a for a in parts if a is not None]

    def rescale(self, peak: mx.array) -> None:
        """Move to a new maximum."""
        factor = exponential(self.peak - peak)
        self.peak = peak
        self.total = self.total * factor
        self.exact = None if self.exact is None else self.exact * factor
        self.mixed = None if self.mixed is None else self.mixed * factor
        self.mass = None if self.mass is None else self.mass * factor

    def add(self, segment: Segment, weights: mx.array) -> None:
        """Add a segment's weighted values."""
        out = segment.mix(weights)
        if not segment.coded:
            self.exact = out if self.exact is None else self.exact + out
            return
        mass = weights.sum(axis=-1, keepdims=True)
        self.mixed = out if self.mixed is None else self.mixed + out
        self.mass = mass if self.mass is None else self.mass + mass


def attend(
    queries: mx.array,
    segments: Sequence[Segment],
    codec: KVCodec,
    constants: Fields,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    budget: int = DEFAULT_BUDGET,
) -> mx.array:
    """Softmax attention over exact and coded tokens.

    Args:
        queries: ``(B, Hq, L, D)``, any float dtype, post-RoPE.
        segments: The tokens, in order; together they cover the sequence.
        codec: The layer's codec.
        constants: What the sequence keeps once.
        scale: Factor on the scores.
        mask: ``None``, ``"causal"`` (aligned to the lower right) or an array over
            ``(..., L, T)``, bool or additive.
        sinks: ``(Hq,)`` extra logits that take weight and give no value.
        budget: Bytes of transients that one tile may take.

    Returns:
        ``(B, Hq, L, Dv)`` in the queries' dtype.

    Raises:
        ConfigError: Where the mask does not fit.
    """
    B, Hq, L, D = queries.shape
    Hkv = codec.layer.kv_heads
    G = Hq // Hkv
    tokens = sum(len(span) for s in segments for span in s.spans)
    check_mask(mask, L, tokens)
    rows = (queries.astype(mx.float32) * scale).reshape(B, Hkv, G * L, D)
    ready = codec.queries(rows, range(tokens - L, tokens))
    tile = max(32, budget // (B * Hq * L * 4 * _SCORE_COPIES))

    run: _Running | None = None
    if sinks is not None:
        peak = mx.broadcast_to(
            sinks.astype(mx.float32).reshape(1, Hkv, G, 1, 1), (B, Hkv, G, L, 1)
        ).reshape(B, Hkv, G * L, 1)
        run = _Running(peak, mx.ones_like(peak))
    for group in _tiles(segments, tile):
        if run is not None:
            held = run.arrays()
            raw, mapped = mx.depends([ready.raw, ready.mapped], held)
            ready = Queries(raw, mapped, ready.positions)
        scores = [
            _masked(s.scores(ready), segment_mask(mask, s.spans, L, tokens), G, L) for s in group
        ]
        run = _absorb(run, group, scores)
    if run is None:
        return mx.zeros((B, Hq, L, codec.layer.value_dim), queries.dtype)
    out = _finish(run, codec, constants)
    return out.reshape(B, Hq, L, -1).astype(queries.dtype)


def _masked(scores: mx.array, mask: mx.array | None, G: int, L: int) -> mx.array:
    if mask is None:
        return scores
    B, Hkv, M, n = scores.shape
    return apply_mask(scores.reshape(B, Hkv, G, L, n), mask).reshape(B, Hkv, M, n)


def _tiles(segments: Iterable[Segment], size: int) -> Iterable[list[Segment]]:
    """Group segments into tiles of at most ``size`` tokens, splitting the long ones."""
    group: list[Segment] = []
    held = 0
    for segment in segments:
        for part in segment.split(size):
            count = sum(len(span) for span in part.spans)
            if held + count > size and group:
                yield group
                group, held = [], 0
            group.append(part)
            held += count
    if group:
        yield group


def _absorb(run: _Running | None, group: list[Segment], scores: list[mx.array]) -> _Running:
    """Add a tile to the running softmax."""
    peak = scores[0].max(axis=-1, keepdims=True)
    for s in scores[1:]:
        peak = mx.maximum(peak, s.max(axis=-1, keepdims=True))
    if run is None:
        run = _Running(peak, mx.zeros_like(peak))
    else:
        run.rescale(mx.maximum(run.peak, peak))
    for segment, s in zip(group, scores, strict=True):
        weights = exponential(s - run.peak)
        run.total = run.total + weights.sum(axis=-1, keepdims=True)
        run.add(segment, weights)
    return run


def _finish(run: _Running, codec: KVCodec, constants: Fields) -> mx.array:
    out = run.exact
    if run.mixed is not None and run.mass is not None:
        coded = codec.outputs(run.mixed, run.mass, constants)
        out = coded if out is None else out + coded
    if out is None:
        return mx.zeros((*run.peak.shape[:-1], codec.layer.value_dim), mx.float32)
    return out / run.total
