from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve

from kvcompress.attention import CodedSegment, ExactSegment, Segment
from kvcompress.attention.rows import Rows, tile_size, tiles
from kvcompress.stages.windowed import WindowedRope
from tests.stand_ins import LAYER, StandIn, tokens


def segments() -> list[Segment]:
    """Three sinks, 40 coded tokens in two runs, 7 recent ones."""
    _, k, v = tokens(50)
    codec = StandIn().bind(LAYER)
    rows = [mx.concatenate([x[:, :, :3], x[:, :, 43:]], axis=2) for x in (k, v)]
    out: list[Segment] = [ExactSegment(rows[0], rows[1], (range(3), range(43, 50)))]
    for span in (range(3, 30), range(30, 43)):
        part = slice(span.start, span.stop)
        codes = codec.encode(k[:, :, part], v[:, :, part], span)
        out.append(CodedSegment(codec, codes, (span,), span))
    return out


@pytest.mark.parametrize("size", [1, 4, 10, 13, 1000])
def test_tiles_hold_every_token_once_and_no_more_than_their_size(size: int) -> None:
    groups = list(tiles(segments(), size))
    counts = [sum(len(span) for s in group for span in s.spans) for group in groups]
    assert max(counts) <= size
    places = [p for group in groups for s in group for span in s.spans for p in span]
    assert sorted(places) == list(range(50))
    assert len(groups) <= -(-50 // size) + 2


def test_a_tile_is_what_the_budget_allows_but_not_next_to_nothing() -> None:
    queries, codec = mx.zeros((2, 6, 5, 32)), StandIn().bind(LAYER)
    assert tile_size(queries, codec, 1) == 32
    assert tile_size(queries, codec, 24 << 20) == (24 << 20) // (2 * 6 * 5 * 40)
    banded = evolve(codec, rope=WindowedRope())
    assert tile_size(queries, banded, 24 << 20) == (24 << 20) // (2 * 6 * 5 * 80)


def test_scores_are_scaled_products_with_hidden_ones_lowest() -> None:
    q, k, _ = tokens(50)
    q = q[:, :, -4:]
    mask = np.random.default_rng(0).random((4, 50)) > 0.3
    rows = Rows.of(q, segments(), StandIn().bind(LAYER), 0.5, mx.array(mask))
    whole = 0.5 * np.array(q).reshape(1, 2, 3, 4, 32) @ np.array(k)[:, :, None].swapaxes(-1, -2)
    whole = np.where(mask, whole, np.finfo(np.float32).min).reshape(1, 2, 12, 50)
    later = rows.after([mx.zeros(1)])
    for segment in segments():
        places = [p for span in segment.spans for p in span]
        got = rows.scores(segment)
        np.testing.assert_allclose(got, whole[..., places], rtol=1e-4, atol=1e-4)
        assert mx.array_equal(later.scores(segment), got)
