"""A step's queries as rows of scores, and its tokens in tiles of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx
from attrs import evolve, frozen

from kvcompress.attention.masks import Mask, apply_mask, check_mask, segment_mask
from kvcompress.attention.segments import Segment
from kvcompress.codec import KVCodec
from kvcompress.stages.rope import Queries
from kvcompress.stages.windowed import WindowedRope

DEFAULT_BUDGET = 64 << 20  # bytes of transients a step may hold
_SCORE_COPIES = 10  # scores, weights and elementwise temporaries that live at once, measured
_BAND_COPIES = 10  # more, where a chunk's queries put tokens in several bands


@frozen(eq=False)
class Rows:
    """``M = G * L`` rows a KV head, and what is hidden from them.

    Attributes:
        queries: The queries as the codec reads codes with.
        group: Query heads of a KV head, ``G``.
        length: Positions, ``L``.
        tokens: Tokens in all, ``T``.
        mask: As :func:`kvcompress.attention.attend` takes it.
    """

    queries: Queries
    group: int
    length: int
    tokens: int
    mask: Mask

    @classmethod
    def of(
        cls,
        queries: mx.array,
        segments: Sequence[Segment],
        codec: KVCodec,
        scale: float,
        mask: Mask,
    ) -> Rows:
        """Rows of ``(B, Hq, L, D)`` queries of any float dtype.

        Raises:
            ConfigError: Where the mask does not fit.
        """
        B, Hq, L, D = queries.shape
        Hkv = codec.layer.kv_heads
        tokens = sum(len(span) for s in segments for span in s.spans)
        check_mask(mask, queries.shape, tokens)
        rows = (queries.astype(mx.float32) * scale).reshape(B, Hkv, Hq // Hkv * L, D)
        ready = codec.queries(rows, range(tokens - L, tokens))
        return cls(ready, Hq // Hkv, L, tokens, mask)

    def scores(self, segment: Segment) -> mx.array:
        """``(B, Hkv, M, n)`` float32; the lowest finite number where a token is hidden."""
        scores = segment.scores(self.queries)
        mask = segment_mask(self.mask, segment.spans, self.length, self.tokens)
        if mask is None:
            return scores
        B, Hkv, M, n = scores.shape
        grouped = scores.reshape(B, Hkv, self.group, self.length, n)
        return apply_mask(grouped, mask).reshape(B, Hkv, M, n)

    def after(self, done: list[mx.array]) -> Rows:
        """The same rows, not to be used before ``done`` is computed."""
        ready = self.queries
        raw, mapped = mx.depends([ready.raw, ready.mapped], done)
        return evolve(self, queries=Queries(raw, mapped, ready.positions))


def tile_size(queries: mx.array, codec: KVCodec, budget: int) -> int:
    """Tokens whose scores against ``(B, Hq, L, D)`` queries take no more than ``budget`` bytes."""
    B, Hq, L, _ = queries.shape
    copies = _SCORE_COPIES + (_BAND_COPIES if isinstance(codec.rope, WindowedRope) else 0)
    return max(32, budget // (B * Hq * L * 4 * copies))


def tiles(segments: Iterable[Segment], size: int) -> Iterator[list[Segment]]:
    """Group segments into tiles of at most ``size`` tokens, splitting the long ones."""
    group: list[Segment] = []
    held = 0
    for segment in segments:
        # A segment that fits is not sliced, which would be an operation for each of its arrays.
        whole = 0 < _tokens(segment) <= size
        for part in [segment] if whole else segment.split(size):
            count = _tokens(part)
            if held + count > size and group:
                yield group
                group, held = [], 0
            group.append(part)
            held += count
    if group:
        yield group


def _tokens(segment: Segment) -> int:
    return sum(len(span) for span in segment.spans)
