"""The softmax so far: what tiles are added to, one after the other."""

from __future__ import annotations

import mlx.core as mx
from attrs import define

from kvcompress.attention.exponential import exponential
from kvcompress.attention.segments import Segment
from kvcompress.codec import KVCodec
from kvcompress.stages.base import Fields


@define
class Running:
    """Row maximum, sum of weights, and weighted values in two spaces."""

    peak: mx.array  # (B, Hkv, M, 1)
    total: mx.array  # (B, Hkv, M, 1)
    exact: mx.array | None = None  # (B, Hkv, M, Dv), value space
    mixed: mx.array | None = None  # (B, Hkv, M, Dv), code space
    mass: mx.array | None = None  # (B, Hkv, M, 1), weight that stands for coded tokens

    def arrays(self) -> list[mx.array]:
        """What is held."""
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
        """Add a segment's weights and weighted values."""
        sums = weights.sum(axis=-1, keepdims=True)
        self.total = self.total + sums
        out = segment.mix(weights)
        if segment.coded:
            self.mass = _with(self.mass, sums)
            self.mixed = _with(self.mixed, out)
        else:
            self.exact = _with(self.exact, out)

    def weigh(self, weights: mx.array) -> None:
        """Add the weights of coded tokens, whose values are left to be added."""
        self.mass = _with(self.mass, weights.sum(axis=-1, keepdims=True))

    def output(self, codec: KVCodec, constants: Fields) -> mx.array:
        """The weighted mean of the values: ``(B, Hkv, M, Dv)`` float32."""
        out = self.exact
        if self.mixed is not None and self.mass is not None:
            coded = codec.outputs(self.mixed, self.mass, constants)
            out = coded if out is None else out + coded
        if out is None:
            return mx.zeros((*self.peak.shape[:-1], codec.layer.value_dim), mx.float32)
        return out / self.total


def _with(held: mx.array | None, more: mx.array) -> mx.array:
    return more if held is None else held + more


def begun(logits: mx.array, queries: mx.array, kv_heads: int) -> Running:
    """A softmax that begins with learnt logits ``(Hq,)``, which take weight and give no value."""
    B, Hq, L, _ = queries.shape
    G = Hq // kv_heads
    peak = mx.broadcast_to(
        logits.astype(mx.float32).reshape(1, kv_heads, G, 1, 1), (B, kv_heads, G, L, 1)
    ).reshape(B, kv_heads, G * L, 1)
    return Running(peak, mx.ones_like(peak))


def raised(run: Running | None, scores: list[mx.array]) -> Running:
    """The softmax so far, moved to a maximum that holds for a tile's scores too."""
    peak = scores[0].max(axis=-1, keepdims=True)
    for s in scores[1:]:
        peak = mx.maximum(peak, s.max(axis=-1, keepdims=True))
    if run is None:
        return Running(peak, mx.zeros_like(peak))
    run.rescale(mx.maximum(run.peak, peak))
    return run
