"""Exact attention over segments in bounded memory: online softmax, merged by log-sum-exp.

The transient of a step is a few score matrices of one tile, whatever the length of the
sequence. Tiles are chained with ``mx.depends``: without it the lazy graph would hold every
tile's scores at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from kvcompress.attention.exponential import exponential
from kvcompress.attention.masks import Mask
from kvcompress.attention.rows import DEFAULT_BUDGET, Rows, tile_size, tiles
from kvcompress.attention.running import Running, begun, raised
from kvcompress.attention.segments import Segment
from kvcompress.attention.selection import selected, selects
from kvcompress.codec import KVCodec
from kvcompress.stages.base import Fields


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

    A codec whose ``attend_fraction`` is less than 1 has a step of few queries read a part of the
    coded values: see :mod:`kvcompress.attention.selection`.

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
    B, Hq, L, _ = queries.shape
    rows = Rows.of(queries, segments, codec, scale, mask)
    groups = tiles(segments, tile_size(queries, codec, budget))
    run = None if sinks is None else begun(sinks, queries, codec.layer.kv_heads)
    if selects(codec, segments, L):
        run = selected(rows, list(groups), codec, run).run
    else:
        run = _all(rows, groups, run)
    if run is None:
        return mx.zeros((B, Hq, L, codec.layer.value_dim), queries.dtype)
    return run.output(codec, constants).reshape(B, Hq, L, -1).astype(queries.dtype)


def _all(rows: Rows, groups: Iterable[list[Segment]], run: Running | None) -> Running | None:
    """Add every tile to the softmax."""
    for group in groups:
        if run is not None:
            rows = rows.after(run.arrays())
        scores = [rows.scores(segment) for segment in group]
        run = raised(run, scores)
        for segment, s in zip(group, scores, strict=True):
            run.add(segment, exponential(s - run.peak))
    return run
