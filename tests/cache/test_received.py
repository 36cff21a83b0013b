from __future__ import annotations

import copy
import gc
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.received import chosen, received, retrieved
from kvcompress.cache.state import compact_state
from tests.stand_ins import LAYER, StandIn, cache, tokens

SCALE = 0.17
HALF = {"marked": True, "careful_fraction": 0.3}


def oracle(
    q: Any,
    k: Any,
    window: int,
    sinks: int,
    mask: np.ndarray | None = None,
    logits: np.ndarray | None = None,
) -> np.ndarray:
    """``(B, T, T)``: what token ``t`` gives token ``j`` by dense attention, over all heads."""
    q, k = np.asarray(q, dtype=np.float64), np.asarray(k, dtype=np.float64)
    Hq, T = q.shape[1:3]
    k = np.repeat(k, Hq // k.shape[1], axis=1)
    place = np.arange(T)
    behind = place[:, None] - place[None]
    seen = (behind >= 0) & ((behind <= window) | (place < sinks))
    if mask is not None:
        seen = seen & mask
    scores = np.where(seen, SCALE * q @ k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True)
    if logits is not None:
        total = total + np.exp(logits.reshape(1, Hq, 1, 1))
    return np.asarray((weights / np.maximum(total, 1e-30)).sum(1) * (behind <= window))


@given(
    before=st.integers(0, 60),
    coded=st.integers(0, 40),
    queries=st.integers(1, 70),
    window=st.sampled_from([1, 5, 16, 200]),
    sinks=st.sampled_from([0, 1, 4]),
    masked=st.booleans(),
    extra=st.booleans(),
    budget=st.sampled_from([1, 1 << 16, 64 << 20]),
    seed=st.integers(0, 99),
)
def test_what_tokens_receive_is_what_dense_attention_gives_them(
    before: int,
    coded: int,
    queries: int,
    window: int,
    sinks: int,
    masked: bool,
    extra: bool,
    budget: int,
    seed: int,
) -> None:
    if coded and before < sinks:
        coded = 0
    count = before + coded + queries
    q, k, _ = tokens(count, seed=seed, batch=2)
    rng = np.random.default_rng(seed)
    mask = rng.random((queries, count)) > 0.4 if masked else None
    if mask is not None:
        mask[0] = False  # a row that sees nothing gives nothing
    logits = rng.normal(size=6).astype(np.float32) if extra else None
    kept = np.r_[0:sinks, sinks + coded : count] if coded else np.arange(count)
    whole = np.ones((count, count), dtype=bool)
    whole[:, sinks : sinks + coded] = False
    if mask is not None:
        whole[count - queries :] &= mask
    wanted = oracle(q, k, window, sinks, whole, logits)[:, count - queries :, kept].sum(1)
    got = received(
        q[:, :, count - queries :],
        k[:, :, mx.array(kept)],
        coded,
        window=window,
        sinks=sinks,
        scale=SCALE,
        mask="causal" if mask is None else mx.array(mask),
        logits=None if logits is None else mx.array(logits),
        budget=budget,
    )
    inside = kept >= sinks
    np.testing.assert_allclose(np.array(got)[:, inside], wanted[:, inside], atol=1e-4)


@given(
    blocks=st.integers(1, 4),
    block=st.sampled_from([16, 32]),
    done=st.integers(0, 40),
    fraction=st.sampled_from([0.01, 0.2, 0.5, 0.99]),
    seed=st.integers(0, 99),
)
def test_the_chosen_are_first_in_their_block(
    blocks: int, block: int, done: int, fraction: float, seed: int
) -> None:
    count = blocks * block - done % block
    rng = np.random.default_rng(seed)
    weights, importance = rng.integers(0, 4, size=(2, 2, count)).astype(np.float32)
    got = np.array(chosen(mx.array(weights), mx.array(importance), done, block, fraction))
    for row in range(2):
        for start in range(done - done % block, done + count, block):
            places = [p - done for p in range(max(start, done), start + block)]
            order = sorted(places, key=lambda p: (-weights[row, p], -importance[row, p], p))
            share = ceil(round(fraction * block, 9)) - ceil(
                round(fraction * (block - len(places)), 9)
            )
            assert [p for p in places if got[row, p]] == sorted(order[:share])
    assert got.sum() == 2 * (
        retrieved(done + count, block, fraction) - retrieved(done, block, fraction)
    )


def attended(
    held: CompressedKVCache, q: mx.array, k: mx.array, v: mx.array, chunks: list[int]
) -> None:
    """Feed a cache from where it stands, and let each chunk's queries attend."""
    for count in chunks:
        part = slice(held.offset, held.offset + count)
        keys, _ = held.update_and_fetch(k[:, :, part], v[:, :, part])
        mask = "causal" if count > 1 else None
        mx.eval(keys.step.attend(q[:, :, part], scale=SCALE, mask=mask))


def marks(held: CompressedKVCache) -> np.ndarray:
    """``(B, coded)``: the tokens that were coded with care."""
    held.complete()
    none = np.zeros((held.batch, 0))
    runs = [np.array(fields["k.mark"][:, 0, :, 0]) for fields, _ in held.store.blocks()]
    return np.concatenate([none, *runs], axis=1).astype(bool)


def expected(ranks: np.ndarray, sinks: int, coded: int, block: int, fraction: float) -> np.ndarray:
    """``(B, coded)``: the highest ranks ``(B, T)`` of each block."""
    cut = ranks[:, sinks : sinks + coded].reshape(len(ranks), coded // block, block)
    places = np.argsort(-cut, axis=-1, kind="stable")[..., : ceil(fraction * block)]
    out = np.zeros(cut.shape, dtype=bool)
    np.put_along_axis(out, places, True, -1)
    return out.reshape(len(ranks), coded)


def pieces(count: int, size: int) -> list[int]:
    return [min(size, count - start) for start in range(0, count, size)]


@given(
    count=st.integers(60, 160),
    window=st.sampled_from([5, 16, 40]),
    sinks=st.sampled_from([0, 4]),
    batch=st.integers(1, 2),
    warmup=st.sampled_from([0, 20]),
    chunk=st.sampled_from([1, 7, 50, 1000]),
    seed=st.integers(0, 99),
)
def test_the_most_attended_to_are_coded_with_care_however_tokens_come(
    count: int, window: int, sinks: int, batch: int, warmup: int, chunk: int, seed: int
) -> None:
    q, k, v = tokens(count, seed=seed, batch=batch)
    held = cache(window=window, sinks=sinks, warmup=warmup, steps=2.0, **HALF)
    attended(held, q, k, v, pieces(count, chunk))
    coded = held.tokens_coded
    given_to = oracle(q, k, window, sinks).sum(1)
    wanted = expected(given_to, sinks, coded, 8, 0.3)
    np.testing.assert_array_equal(marks(held), wanted)
    assert held.tokens_retrieved == coded // 8 * 3 == held.report.tokens_retrieved
    assert held.report.stored_bytes == held.report.predicted_bytes


@pytest.mark.parametrize("chunk", [1, 7, 120])
def test_where_no_query_is_seen_the_key_decides(chunk: int) -> None:
    _, k, v = tokens(120, batch=2)
    held = cache(**HALF)
    for start in range(0, 120, chunk):
        held.update_and_fetch(k[:, :, start : start + chunk], v[:, :, start : start + chunk])
    energy = np.square(np.array(k)).sum((1, 3))
    np.testing.assert_array_equal(marks(held), expected(energy, 4, held.tokens_coded, 8, 0.3))


def test_tokens_that_were_seen_come_before_those_that_were_not() -> None:
    q, k, v = tokens(60)
    held = cache(window=4, sinks=0, **HALF)
    held.update_and_fetch(k[:, :, :6], v[:, :, :6])
    attended(held, q, k, v, [54])
    given_to = oracle(q, k, 4, 0)[:, 6:].sum(1)
    unseen = np.square(np.array(k)).sum((1, 3)) - 1e9
    ranks = np.where(given_to > 0, given_to, unseen)
    assert (given_to[0, :2] == 0).all()
    np.testing.assert_array_equal(marks(held), expected(ranks, 0, held.tokens_coded, 8, 0.3))


def round_trips(held: CompressedKVCache) -> dict[str, CompressedKVCache]:
    compact = CompressedKVCache(held.method, held.layer, held.codec)
    compact.state = compact_state(held)
    return {
        "state": type(held).from_state(held.state),
        "file": compact,
        "copy": copy.deepcopy(held),
        "batch": held.merge([held, held]).extract(1),
    }


@given(
    first=st.integers(1, 90), chunk=st.sampled_from([1, 13, 90]), window=st.sampled_from([5, 16])
)
def test_what_was_received_goes_with_the_sequence(first: int, chunk: int, window: int) -> None:
    q, k, v = tokens(first + 60)
    held = cache(window=window, **HALF)
    attended(held, q, k, v, pieces(first, chunk))
    others = round_trips(held)
    attended(held, q, k, v, [1, 20, 39])
    for name, other in others.items():
        attended(other, q, k, v, [1, 20, 39])
        assert np.array_equal(marks(other), marks(held)), name
        assert mx.array_equal(other.exact.received, held.exact.received), name
        assert other.nbytes == held.nbytes


def test_a_batch_judges_each_row_by_its_own_queries() -> None:
    rows, lengths = [], (50, 37)
    for seed, count in enumerate(lengths):
        q, k, v = tokens(count, seed=seed)
        rows.append(cache(**HALF))
        attended(rows[-1], q, k, v, [count])
    batch = rows[0].merge(rows)
    q, k, v = tokens(30, seed=9, batch=2)
    for start in range(30):
        part = slice(start, start + 1)
        mask = batch.make_mask(1)
        keys, _ = batch.update_and_fetch(k[:, :, part], v[:, :, part])
        mx.eval(keys.step.attend(q[:, :, part], scale=SCALE, mask=mask))
    for i, row in enumerate(rows):
        for start in range(30):
            part = (slice(i, i + 1), slice(None), slice(start, start + 1))
            keys, _ = row.update_and_fetch(k[part], v[part])
            mx.eval(keys.step.attend(q[part], scale=SCALE))
        assert np.array_equal(marks(batch.extract(i)), marks(row))


@given(
    count=st.integers(30, 120),
    forget=st.integers(0, 120),
    more=st.integers(1, 60),
    fraction=st.sampled_from([0.1, 0.3, 0.9]),
)
def test_a_trim_drops_what_the_forgotten_received(
    count: int, forget: int, more: int, fraction: float
) -> None:
    q, k, v = tokens(count + more)
    held = cache(marked=True, careful_fraction=fraction)
    attended(held, q, k, v, pieces(count, 11))
    before = marks(held)[:, : max(0, count - forget - 4)] if held.tokens_coded else None
    held.trim(forget)
    assert held.exact.received is None or held.exact.received.shape[2] == held.exact.used
    if held.tokens_coded and before is not None:
        np.testing.assert_array_equal(marks(held), before)
        found = marks(held).sum()
        assert abs(held.tokens_retrieved - found) <= ceil(fraction * 8)
    attended(held, q, k, v, [1, more - 1] if more > 1 else [1])
    numbers = held.report
    assert numbers.stored_bytes == numbers.predicted_bytes
    if not (count - forget - 4) % 8:  # no block was cut
        assert held.tokens_retrieved == (marks(held).sum() if held.tokens_coded else 0)


@pytest.mark.parametrize("cut", [0, 29, 33])
def test_long_chunks_are_chosen_from_block_by_block(cut: int) -> None:
    q, k, v = tokens(2400)
    found = []
    for chunks in ([2250], [7, 500, 1743]):
        held = cache(**HALF)
        attended(held, q, k, v, [100])
        held.trim(cut)
        attended(held, q, k, v, chunks)
        found.append(marks(held))
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0].shape[1] > 2048 + 100


def test_what_forgotten_queries_gave_stays() -> None:
    q, k, v = tokens(20)
    held = cache(**HALF)
    attended(held, q, k, v, [20])
    held.trim(5)
    received_by = np.array(held.exact.received)[0, 0, :, 0]
    np.testing.assert_allclose(received_by[4:], oracle(q, k, 16, 4).sum(1)[0, 4:15], atol=1e-4)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_nothing_is_tracked_where_there_is_nothing_to_choose(fraction: float) -> None:
    q, k, v = tokens(100)
    held, plain = cache(marked=True, careful_fraction=fraction), cache(marked=True)
    for one in (held, plain):
        attended(one, q, k, v, [60, 40])
    assert held.exact.received is None
    assert (marks(held) == fraction).all()
    assert held.tokens_retrieved == fraction * held.tokens_coded
    assert held.nbytes == plain.nbytes == held.report.predicted_bytes + held.reserved_bytes
    assert [type(a) for a in held.state] == [type(a) for a in plain.state]


def test_a_coder_with_one_assignment_has_nothing_to_choose() -> None:
    q, k, v = tokens(100)
    held = cache(careful_fraction=0.3)
    attended(held, q, k, v, [100])
    assert not held.codec.chooses
    assert held.exact.received is None
    assert (held.tokens_retrieved, cache().report.tokens_retrieved) == (0, 0)
    assert held.nbytes == held.report.predicted_bytes + held.reserved_bytes


@pytest.mark.parametrize("window", [0, -1])
def test_blocks_of_one_are_all_coded_with_care(window: int) -> None:
    q, k, v = tokens(50)
    held = cache(window=window, **HALF)
    attended(held, q, k, v, [1, 30, 19])
    assert marks(held).all()
    assert held.tokens_retrieved == held.tokens_coded == 46
    assert held.report.stored_bytes == held.report.predicted_bytes


LOOKS = {
    "state": lambda held: held.state,
    "bytes": lambda held: held.nbytes,
    "report": lambda held: held.report,
    "reserved": lambda held: held.reserved_bytes,
    "rows": lambda held: held.keys_and_values(),
    "copy": copy.deepcopy,
    "trim": lambda held: held.trim(0),
    "compact": compact_state,
    "merge": lambda held: held.merge([held]),
}


@pytest.mark.parametrize("look", sorted(LOOKS))
def test_whoever_looks_first_has_the_cache_coded_with_what_is_known(look: str) -> None:
    q, k, v = tokens(100)
    held, blind = cache(**HALF), cache(**HALF)
    for one in (held, blind):
        attended(one, q, k, v, [40])
    keys, _ = held.update_and_fetch(k[:, :, 40:90], v[:, :, 40:90])
    assert held.tokens_coded == held.coded_at(90) > held.store.tokens
    LOOKS[look](held)
    assert held.store.tokens == held.tokens_coded
    out = keys.step.attend(q[:, :, 40:90], scale=SCALE, mask="causal")  # too late to choose
    assert np.isfinite(np.array(out)).all()
    blind.update_and_fetch(k[:, :, 40:90], v[:, :, 40:90])
    np.testing.assert_array_equal(marks(held), marks(blind))
    assert mx.array_equal(held.exact.received, blind.exact.received)


@pytest.mark.parametrize("then", ["trim", "advance", "state"])
def test_queries_that_come_too_late_do_not_count(then: str) -> None:
    q, k, v = tokens(27)
    held = cache(**HALF)
    keys, _ = held.update_and_fetch(k[:, :, :17], v[:, :, :17])
    if then == "trim":
        held.trim(3)
    elif then == "advance":
        held.update_and_fetch(k[:, :, 17:], v[:, :, 17:])
    else:
        held.state = held.state
    mx.eval(keys.step.attend(q[:, :, :17], scale=SCALE, mask="causal"))
    assert held.exact.received is not None
    assert held.exact.received.shape[2] == held.exact.used
    assert not held.exact.received.any()


def test_layers_that_share_a_cache_do_not_choose() -> None:
    q, k, v = tokens(100)
    method = StandIn(**HALF)  # type: ignore[arg-type]
    shared = CompressedKVCache(method, LAYER, method.bind(LAYER), shared=True)
    alone = cache(**HALF)
    for start in range(0, 100, 10):
        part = slice(start, start + 10)
        keys, _ = shared.update_and_fetch(k[:, :, part], v[:, :, part])
        mx.eval(keys.step.attend(q[:, :, part], scale=SCALE, mask="causal"))
        again, _ = shared.keys_and_values()
        mx.eval(again.step.attend(-q[:, :, part], scale=SCALE, mask="causal"))
    attended(alone, q, k, v, pieces(100, 10))
    np.testing.assert_array_equal(marks(shared), marks(alone))


def test_attention_is_the_same_whether_or_not_it_is_watched() -> None:
    q, k, v = tokens(100)
    watched, plain = cache(**HALF), cache(marked=True)
    for chunk in (30, 1, 1, 60, 8):
        part = slice(watched.offset, watched.offset + chunk)
        outs = []
        for held in (watched, plain):
            keys, _ = held.update_and_fetch(k[:, :, part], v[:, :, part])
            outs.append(keys.step.attend(q[:, :, part], scale=SCALE, mask="causal"))
        assert mx.array_equal(*outs)


def test_a_mask_hides_tokens_from_the_witness() -> None:
    q, k, v = tokens(60)
    held = cache(window=16, sinks=0, **HALF)
    keys, _ = held.update_and_fetch(k, v)
    mask = np.tri(60, dtype=bool) & ~np.tri(60, k=-3, dtype=bool)
    mx.eval(keys.step.attend(q, scale=SCALE, mask=mx.array(mask)))
    ranks = oracle(q, k, 16, 0, mask).sum(1)
    np.testing.assert_array_equal(marks(held), expected(ranks, 0, 40, 8, 0.3))


@pytest.mark.parametrize("huge", [2**31, 2**63, 10**30])
def test_a_window_of_any_size_is_one_over_everything(huge: int) -> None:
    q, k, _ = tokens(60)
    settings = {"scale": SCALE, "mask": "causal", "budget": 1 << 20}
    whole = received(q, k, 0, window=60, sinks=4, **settings)
    assert mx.array_equal(received(q, k, 0, window=huge, sinks=4, **settings), whole)
    everything_sinks = received(q, k, 0, window=huge, sinks=huge, **settings)
    assert mx.array_equal(everything_sinks, received(q, k, 0, window=60, sinks=60, **settings))


def test_a_long_chunk_is_judged_in_bounded_memory() -> None:
    def peak(count: int) -> int:
        q, k, _ = tokens(count)
        mx.eval(q, k)
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(received(q, k, 0, window=32, sinks=4, scale=SCALE, mask="causal", budget=1 << 20))
        return mx.get_peak_memory() - before

    assert peak(8_000) < 1.5 * peak(2_000)


def test_what_is_stored_is_computed_with_the_output() -> None:
    q, k, v = tokens(600)
    held = cache(**HALF)
    keys, _ = held.update_and_fetch(k, v)
    mx.eval(keys.step.attend(q, scale=SCALE, mask="causal"))
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(list(held._arrays()))
    assert mx.get_peak_memory() - before < 1000


def test_steps_leave_no_graph_behind() -> None:
    layer = evolve(LAYER, dtype="float16")
    q, k, v = tokens(1, layer)
    mx.eval(q, k, v)
    held, used = cache(layer, window=64, block=32, **HALF), []
    for step in range(400):
        keys, _ = held.update_and_fetch(k, v)
        mx.eval(keys.step.attend(q, scale=SCALE))  # as decoding does: no look at the state
        del keys
        if step in (199, 399):
            gc.collect()
            mx.synchronize()
            used.append(mx.get_active_memory() - held.nbytes)
    assert used[1] - used[0] < 20_000


def test_letting_go_of_room_within_a_step_codes_as_the_next_look_would() -> None:
    _, k, v = tokens(100)
    compacted, looked = (cache(window=16, steps=2.0, **HALF) for _ in range(2))
    for held in (compacted, looked):
        held.update_and_fetch(k, v)
    compacted.compact()
    assert looked.nbytes
    assert compacted.exact.received is not None
    assert compacted.tokens_retrieved == looked.tokens_retrieved
    for ours, theirs in zip(compacted.store.blocks(), looked.store.blocks(), strict=True):
        assert all(mx.array_equal(ours[0][name], theirs[0][name]) for name in ours[0])
