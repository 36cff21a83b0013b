from __future__ import annotations

import numpy as np
import pytest

from kvcompress.attention import CodedSegment, ExactSegment, Segment
from tests.stand_ins import LAYER, StandIn, largest, tokens


def segments() -> list[Segment]:
    _, k, v = tokens(20)
    codec = StandIn().bind(LAYER)
    codes = codec.encode(k, v, range(4, 24))
    return [
        ExactSegment(k, v, (range(4), range(30, 46))),
        CodedSegment(codec, codes, (range(4, 24),), range(4, 24)),
    ]


@pytest.mark.parametrize("size", [1, 3, 7, 20, 100])
def test_splitting_keeps_places_scores_and_values(size: int) -> None:
    codec = StandIn().bind(LAYER)
    q, _, _ = tokens(5, seed=1)
    queries = codec.queries(q.reshape(1, 2, 15, 32), range(60, 65))
    for segment in segments():
        parts = list(segment.split(size))
        places = [p for part in parts for span in part.spans for p in span]
        assert places == [p for span in segment.spans for p in span]
        assert all(sum(len(s) for s in part.spans) <= size for part in parts)
        whole = np.array(segment.scores(queries))
        np.testing.assert_allclose(
            np.concatenate([np.array(p.scores(queries)) for p in parts], axis=-1), whole, atol=1e-4
        )


def test_coded_and_exact_segments_agree_on_the_same_tokens() -> None:
    q, k, v = tokens(20)
    codec = StandIn().bind(LAYER)
    queries = codec.queries(q.reshape(1, 2, 60, 32), range(40, 60))
    exact = ExactSegment(k, v, (range(4, 24),))
    coded = CodedSegment(codec, codec.encode(k, v, range(4, 24)), (range(4, 24),), range(4, 24))
    assert largest(exact.scores(queries) - coded.scores(queries)) < 1e-4
    weights = exact.scores(queries)
    assert largest(exact.mix(weights) - coded.mix(weights)) < 1e-3
