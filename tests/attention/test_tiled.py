from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.attention import CodedSegment, ExactSegment, Segment, attend
from kvcompress.stages.rope import PostRope, PreRope
from tests.stand_ins import LAYER, StandIn, largest, tokens

SCALE = 0.17


def build(method: StandIn, count: int, sinks: int, coded: int, cuts: int):
    q, k, v = tokens(count, seed=count)
    codec = method.bind(LAYER)
    constants = codec.begin(k[:, :, sinks:], v[:, :, sinks:], range(sinks, count))
    out: list[Segment] = []
    edges = np.unique(np.linspace(sinks, sinks + coded, cuts + 1).astype(int))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        span = range(start, stop)
        codes = codec.encode(k[:, :, start:stop], v[:, :, start:stop], span, constants)
        out.append(CodedSegment(codec, codes, (span,), span))
    places = (range(sinks), range(sinks + coded, count))
    rest = [mx.concatenate([x[:, :, s.start : s.stop] for s in places], axis=2) for x in (k, v)]
    exact = ExactSegment(rest[0], rest[1], tuple(s for s in places if len(s)))
    return q, k, v, codec, constants, [exact, *out]


@given(
    count=st.integers(2, 90),
    data=st.data(),
    rope=st.sampled_from([PostRope(), PreRope()]),
    warmup=st.sampled_from([0, 4]),
)
def test_any_tiles_and_partition_give_what_dense_attention_gives(
    count: int, data: st.DataObject, rope: PostRope | PreRope, warmup: int
) -> None:
    sinks = data.draw(st.integers(0, min(4, count - 1)), "sinks")
    coded = data.draw(st.integers(0, count - sinks - 1), "coded")
    length = data.draw(st.integers(1, count), "queries")
    mask = data.draw(st.sampled_from([None, "causal", "bool", "additive"]), "mask")
    extra = data.draw(st.sampled_from([None, "sinks"]), "logits")
    method = StandIn(warmup=warmup, rope=rope)
    parts = build(method, count, sinks, coded, data.draw(st.integers(1, 4), "cuts"))
    q, k, v, codec, constants, segments = parts
    q = q[:, :, count - length :]
    if mask in ("bool", "additive"):
        shown = np.random.default_rng(count).random((length, count)) > 0.3
        shown[:, 0] = True
        mask = mx.array(shown) if mask == "bool" else mx.array(np.where(shown, 0.3, -np.inf))
        mask = mask if mask.dtype == mx.bool_ else mask.astype(mx.float32)
    logits = mx.array([0.5, -1.0, 2.0, 0.0, 3.0, -5.0]) if extra else None
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask, sinks=logits)
    for budget in (1, 64 << 20):
        out = attend(
            q, segments, codec, constants, scale=SCALE, mask=mask, sinks=logits, budget=budget
        )
        assert largest(out - expected) < 1e-4


def test_rows_that_see_nothing_are_finite() -> None:
    q, _, _, codec, constants, segments = build(StandIn(), 70, 4, 40, 2)
    hidden = mx.zeros((70, 70), dtype=mx.bool_)
    for budget in (1, 64 << 20):
        out = attend(q, segments, codec, constants, scale=SCALE, mask=hidden, budget=budget)
        assert np.isfinite(np.array(out)).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_output_has_the_queries_dtype(dtype: mx.Dtype) -> None:
    q, _, _, codec, constants, segments = build(StandIn(), 30, 4, 10, 1)
    assert attend(q.astype(dtype), segments, codec, constants, scale=SCALE).dtype == dtype


def test_transient_memory_does_not_grow_with_the_number_of_tokens() -> None:
    def peak(count: int) -> int:
        q, _, _, codec, constants, segments = build(StandIn(), count, 0, count - 64, 1)
        q = q[:, :, -64:]
        rows = [segments[0].keys, segments[0].values]  # type: ignore[attr-defined]
        mx.eval(q, *rows, *[a for s in segments[1:] for a in s.codes.fields.values()])  # type: ignore[attr-defined]
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(attend(q, segments, codec, constants, scale=SCALE, budget=1 << 20))
        return mx.get_peak_memory() - before

    assert peak(16_000) < 1.5 * peak(4_000)


def test_segments_without_tokens_add_nothing() -> None:
    q, _, _, codec, constants, segments = build(StandIn(), 70, 4, 40, 2)
    none = ExactSegment(mx.zeros((1, LAYER.kv_heads, 0, 32)), mx.zeros((1, 2, 0, 32)), ())
    q = q[:, :, -1:]
    expected = attend(q, segments, codec, constants, scale=SCALE)
    out = attend(q, [none, *segments], codec, constants, scale=SCALE)
    assert largest(out - expected) == 0
    assert largest(attend(q, [none], codec, constants, scale=SCALE)) == 0
