from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.attention import (
    CodedSegment,
    ExactSegment,
    Segment,
    attend,
    share_of,
    unread_share,
)
from kvcompress.codec import Codes, KVCodec, Pipeline
from kvcompress.errors import ConfigError
from kvcompress.stages.centre import fixed_centre
from kvcompress.stages.transform import Identity
from kvcompress.stages.vq_coder import VQCoder
from tests.stages.vq_cases import product
from tests.stand_ins import LAYER, Rounded, Same, StandIn, cache, largest, tokens

SCALE = 0.17
SINKS = 3
MEAN = np.random.default_rng(5).normal(size=(2, 16)).astype(np.float32)


def codec_of(fraction: float, centre: bool = True) -> KVCodec:
    values = Pipeline(Same(16), Rounded(16, 2), *([fixed_centre(MEAN)] if centre else []))
    return KVCodec(LAYER, Pipeline(Same(32), Rounded(32, 2)), values, attend_fraction=fraction)


def split_up(
    codec: KVCodec, k: mx.array, v: mx.array, coded: int, cuts: int
) -> tuple[list[Segment], Codes]:
    """Sinks and last tokens exact, ``coded`` tokens between them in ``cuts`` runs of codes."""
    out: list[Segment] = []
    edges = np.unique(np.linspace(SINKS, SINKS + coded, cuts + 1).astype(int)).tolist()
    constants = codec.begin(k[:, :, SINKS:], v[:, :, SINKS:], range(SINKS, k.shape[2]))
    for start, stop in pairwise(edges):
        span = range(start, stop)
        codes = codec.encode(k[:, :, start:stop], v[:, :, start:stop], span, constants)
        out.append(CodedSegment(codec, codes, (span,), span))
    places = (range(SINKS), range(SINKS + coded, k.shape[2]))
    rest = [mx.concatenate([x[:, :, s.start : s.stop] for s in places], axis=2) for x in (k, v)]
    return [ExactSegment(rest[0], rest[1], places), *out], codes


def oracle(
    q: Any,
    k: Any,
    v: Any,
    coded: int,
    fraction: float,
    mean: np.ndarray | None,
    mask: np.ndarray | None = None,
    logits: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention that reads a part, and the share left unread, by definition in float64."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    B, Hq, L, D = q.shape
    H, T = k.shape[1:3]
    scores = SCALE * np.einsum("bhgld,bhtd->bhglt", q.reshape(B, H, Hq // H, L, D), k)
    if mask is not None:
        seen = np.broadcast_to(mask, (B, Hq, L, T)).reshape(scores.shape)
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores)
    total = weights.sum(-1)
    if logits is not None:
        total = total + np.exp(logits).reshape(H, -1, 1)
    shares = weights / total[..., None]
    middle = slice(SINKS, SINKS + coded)
    ranks = shares[..., middle].max((2, 3))
    read = np.ones((B, H, T), dtype=bool)
    count = int(np.ceil(np.round(fraction * coded, 9)))
    best = np.argsort(-ranks, axis=-1)[..., :count]
    read[..., middle] = False
    np.put_along_axis(read[..., middle], best, True, -1)
    kept = shares * read[:, :, None, None]
    unread = shares.sum(-1) - kept.sum(-1)
    out = np.einsum("bhglt,bhtd->bhgld", kept, v)
    if mean is None:
        out = out / (1 - unread)[..., None]
    else:
        out = out + unread[..., None] * mean[:, None, None]
    return out.reshape(B, Hq, L, -1), unread.reshape(B, Hq, L)


@given(
    coded=st.integers(1, 150),
    recent=st.integers(8, 40),
    fraction=st.sampled_from([0.01, 0.1, 0.37, 0.5, 0.9]),
    queries=st.integers(1, 8),
    batch=st.integers(1, 2),
    centre=st.booleans(),
    cuts=st.integers(1, 4),
    masked=st.booleans(),
    extra=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_read_is_what_weighs_most(
    coded: int,
    recent: int,
    fraction: float,
    queries: int,
    batch: int,
    centre: bool,
    cuts: int,
    masked: bool,
    extra: bool,
    seed: int,
) -> None:
    count = SINKS + coded + recent
    q, k, v = tokens(count, seed=seed, batch=batch)
    q = q[:, :, :queries]
    codec = codec_of(fraction, centre)
    segments, codes = split_up(codec, k, v, coded, cuts)
    mask = None
    if masked:
        mask = np.random.default_rng(seed).random((queries, count)) > 0.4
        mask[:, -1] = True
    logits = np.array([0.5, -1, 2, 0, 3, -5], dtype=np.float32) if extra else None
    given_logits = None if logits is None else mx.array(logits)
    wanted, unread = oracle(q, k, v, coded, fraction, MEAN if centre else None, mask, logits)
    kept = mask if mask is None else mx.array(mask)
    for budget in (1, 64 << 20):  # tiles of 32 tokens, and one for all
        options: dict[str, Any] = {"scale": SCALE, "mask": kept, "budget": budget}
        out = attend(q, segments, codec, codes.constants, sinks=given_logits, **options)
        np.testing.assert_allclose(np.array(out), wanted, atol=2e-4)
        share = unread_share(q, segments, codec, sinks=given_logits, **options)
        np.testing.assert_allclose(np.array(share), unread, atol=1e-5)


def test_a_fraction_of_one_and_longer_chunks_read_everything() -> None:
    q, k, v = tokens(200)
    part, whole = codec_of(0.1), codec_of(1.0)
    segments, codes = split_up(part, k, v, 150, 3)
    full, _ = split_up(whole, k, v, 150, 3)
    for length, same in ((8, False), (9, True)):
        got, wanted = (
            attend(q[:, :, :length], s, c, codes.constants, scale=SCALE)
            for s, c in ((segments, part), (full, whole))
        )
        assert mx.array_equal(got, wanted) == same
    assert not unread_share(q[:, :, :9], segments, part, scale=SCALE).any()
    nearly = evolve(part, attend_fraction=0.999)  # rounds up to all
    got = attend(q[:, :, :1], split_up(nearly, k, v, 150, 3)[0], nearly, {}, scale=SCALE)
    assert mx.array_equal(got, attend(q[:, :, :1], full, whole, {}, scale=SCALE))


def plain(count: int) -> tuple[mx.array, mx.array, mx.array]:
    """One query and ``count`` tokens of each of eight sequences, values around a mean."""
    q, k, v = tokens(count, batch=8)
    return q[:, :, -1:], k, v + mx.array(MEAN)[None, :, None]


def clustered(count: int) -> tuple[mx.array, mx.array, mx.array]:
    """The same, of tokens of 16 kinds that share keys and values, and a query for one of them."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 16, (8, 1, count, 1))
    k, v = (
        np.take_along_axis(rng.normal(size=(8, 2, 16, dim)), kind, axis=2)
        + 0.5 * rng.normal(size=(8, 2, count, dim))
        for dim in (32, 16)
    )
    q = np.repeat(k[:, :, 40:41], 3, axis=1) + 0.7 * rng.normal(size=(8, 6, 1, 32))
    made = (q, k, v + MEAN[None, :, None])
    return tuple(mx.array(x.astype(np.float32)) for x in made)  # type: ignore[return-value]


KINDS = {"random": plain, "clustered": clustered}


def error(kind: str, fraction: float, centre: bool) -> float:
    """Mean squared error to reading all of 900 coded tokens."""
    q, k, v = KINDS[kind](1000)
    codec = codec_of(fraction, centre)
    segments, codes = split_up(codec, k, v, 900, 2)
    out = attend(q, segments, codec, codes.constants, scale=SCALE)
    full = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE)
    return float(mx.square(out - full).mean())


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_error_falls_as_more_is_read(kind: str, centre: bool) -> None:
    fractions = (0.01, 0.05, 0.2, 0.5, 1.0) if centre else (0.05, 0.2, 0.5, 1.0)
    errors = [error(kind, fraction, centre) for fraction in fractions]
    assert all(b < a for a, b in pairwise(errors)), errors


@pytest.mark.parametrize(
    ("kind", "fraction"),
    [("random", 0.03), ("random", 0.1), ("random", 0.2), ("clustered", 0.1), ("clustered", 0.2)],
)
def test_the_centre_stands_for_the_rest_better_than_nothing_does(
    kind: str, fraction: float
) -> None:
    assert 2 * error(kind, fraction, True) < error(kind, fraction, False)


def test_a_constant_in_a_rows_scores_changes_nothing() -> None:
    """Only the softmax counts: no head chooses for its group because its scores are large."""
    _, k, v = tokens(200)
    k = mx.concatenate([k[..., :-1], mx.ones_like(k[..., -1:])], axis=-1)
    q = mx.random.normal((1, 6, 1, 32), key=mx.random.key(7))
    shift = mx.array([0, 400.0, 0, 0, 0, 90]).reshape(1, 6, 1, 1)
    moved = mx.concatenate([q[..., :-1], q[..., -1:] + shift], axis=-1)
    codec = codec_of(0.1)
    segments, codes = split_up(codec, k, v, 150, 1)
    a, b = (attend(x, segments, codec, codes.constants, scale=SCALE) for x in (q, moved))
    assert largest(a - b) < 1e-4


def test_only_the_chosen_values_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens(300)
    codec = codec_of(0.1)
    segments, codes = split_up(codec, k, v, 250, 3)
    read: list[int] = []
    mix = KVCodec.mix

    def spied(self: KVCodec, weights: mx.array, part: Codes) -> mx.array:
        read.append(part.tokens)
        return mix(self, weights, part)

    monkeypatch.setattr(KVCodec, "mix", spied)
    attend(q[:, :, :4], segments, codec, codes.constants, scale=SCALE)
    assert sum(read) == 25


def test_rows_that_see_nothing_are_finite_and_do_not_choose() -> None:
    q, k, v = tokens(200)
    q = q[:, :, :2]
    codec = codec_of(0.1)
    segments, codes = split_up(codec, k, v, 150, 2)
    seen = np.zeros((2, 200), dtype=bool)
    seen[1, 60:90] = True
    for budget in (1, 64 << 20):
        out = attend(
            q, segments, codec, codes.constants, scale=SCALE, mask=mx.array(seen), budget=budget
        )
        assert np.isfinite(np.array(out)).all()
        wanted, _ = oracle(q[:, :, 1:], k, v, 150, 0.1, MEAN, seen[1:])
        np.testing.assert_allclose(np.array(out[:, :, 1:]), wanted, atol=2e-4)
    codec = codec_of(0.1, centre=False)
    out = attend(q, segments, codec, {}, scale=SCALE, mask=mx.zeros((2, 200), dtype=mx.bool_))
    assert np.isfinite(np.array(out)).all()


def test_a_field_that_heads_share_is_read_for_each() -> None:
    keys, values = (
        Pipeline(Identity(dim), VQCoder(product(dim, 5), 2, gain=True)) for dim in (32, 16)
    )
    q, k, v = tokens(400)
    codec = KVCodec(LAYER, keys, values, attend_fraction=0.2)
    segments, _ = split_up(codec, k, v, 350, 3)
    dense = [codec.decode(s.codes, s.positions) for s in segments if isinstance(s, CodedSegment)]
    seen_k, seen_v = (
        mx.concatenate([x[:, :, :SINKS], *part, x[:, :, SINKS + 350 :]], axis=2)
        for x, part in zip((k, v), zip(*dense, strict=True), strict=True)
    )
    wanted, _ = oracle(q[:, :, :2], seen_k, seen_v, 350, 0.2, None)
    for budget in (1, 64 << 20):
        out = attend(q[:, :, :2], segments, codec, {}, scale=SCALE, budget=budget)
        np.testing.assert_allclose(np.array(out), wanted, atol=2e-4)


def test_transient_memory_does_not_grow_with_what_is_not_read() -> None:
    def peak(count: int) -> int:
        q, k, v = tokens(count)
        codec = codec_of(64 / count)
        segments, codes = split_up(codec, k, v, count - 64, 1)
        q = q[:, :, -4:]
        mx.eval(q, [s.codes.fields for s in segments if isinstance(s, CodedSegment)])
        mx.eval([[s.keys, s.values] for s in segments if isinstance(s, ExactSegment)])
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(attend(q, segments, codec, codes.constants, scale=SCALE, budget=1 << 18))
        return mx.get_peak_memory() - before

    assert peak(16_000) < 1.5 * peak(4_000)


def test_a_cache_reads_a_part_in_single_steps() -> None:
    q, k, v = tokens(300)
    held = cache(attend_fraction=0.25, warmup=8)
    whole = cache(warmup=8)
    for one in (held, whole):
        one.update_and_fetch(k[:, :, :299], v[:, :, :299])
    keys, values = held.update_and_fetch(k[:, :, 299:], v[:, :, 299:])
    out = keys.step.attend(q[:, :, 299:], scale=SCALE)
    full = mx.fast.scaled_dot_product_attention(q[:, :, 299:], keys, values, scale=SCALE)
    share = keys.step.unread_share(q[:, :, 299:], scale=SCALE)
    assert 0 < largest(out - full) < 0.5
    assert 0 < float(share.min()) < float(share.max()) < 0.75
    plain, _ = whole.update_and_fetch(k[:, :, 299:], v[:, :, 299:])
    assert not plain.step.unread_share(q[:, :, 299:], scale=SCALE).any()
    assert not cache(window=1000).advance(k, v).unread_share(q, scale=SCALE).any()


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, float("nan")])
def test_other_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"attend_fraction must be above 0 and at most 1 \(got"):
        StandIn(attend_fraction=fraction).bind(LAYER)


@pytest.mark.parametrize(
    ("count", "fraction", "share"), [(100, 0.07, 7), (10, 0.1, 1), (7, 0.5, 4), (9, 1.0, 9)]
)
def test_a_share_is_rounded_up_but_not_by_round_off(
    count: int, fraction: float, share: int
) -> None:
    assert share_of(count, fraction) == share
