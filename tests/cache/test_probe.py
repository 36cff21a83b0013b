from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from kvcompress.cache.probe import FAR, Probe, Turned, Watch, watch_writes, watched_rope
from kvcompress.cache.view import step_of

X = mx.random.normal((1, 2, 3, 8))


def rope(x: mx.array, **options: object) -> mx.array:
    settings = {"traditional": True, "base": 50.0, "scale": 0.5, "offset": 4, **options}
    return mx.fast.rope(x, 6, **settings)  # type: ignore[arg-type]


def test_results_of_rope_remember_their_arguments_and_keep_their_bits() -> None:
    plain = rope(X)
    with watched_rope(Watch()):
        turned = rope(X)
    assert type(turned) is Turned
    assert mx.array_equal(turned, plain)
    turn = turned.turn
    assert (turn.dims, turn.traditional, turn.base) == (6, True, 50.0)
    assert (turn.scale, turn.freqs, turn.offset) == (0.5, None, 4)


def test_what_is_done_to_a_rotated_array_or_rotated_twice_is_no_known_rotation() -> None:
    with watched_rope(Watch()):
        assert type(rope(X) * 2) is mx.array
        assert type(rope(rope(X))) is mx.array


def test_rope_is_restored_also_after_an_error() -> None:
    original = mx.fast.rope
    with pytest.raises(ValueError, match="dims"), watched_rope(Watch()):
        rope(X[..., :4])
    assert mx.fast.rope is original


def test_rope_that_somebody_else_replaced_meanwhile_stays_theirs() -> None:
    original = mx.fast.rope
    try:
        with watched_rope(Watch()):
            mx.fast.rope = theirs = lambda *a, **k: X
        assert mx.fast.rope is theirs
    finally:
        mx.fast.rope = original


def test_other_threads_see_the_plain_rope() -> None:
    watch, seen = Watch(), []
    with watched_rope(watch):
        thread = threading.Thread(target=lambda: seen.append(type(rope(X))))
        thread.start()
        thread.join()
    assert seen == [mx.array]
    assert watch.turns == 0


def test_a_probe_hands_out_all_tokens_as_views_of_one_step() -> None:
    probe = Probe(Watch())
    assert probe.empty()
    probe.begin()
    probe.update_and_fetch(X, X)
    probe.begin()
    keys, values = probe.update_and_fetch(X[:, :, :1], X[:, :, :1])
    assert probe.offset == 4
    assert keys.shape == values.shape == (1, 2, 4, 8)
    assert mx.array_equal(keys[:, :, :3], X)
    again = probe.keys_and_values()
    assert step_of(*again) is step_of(keys, values) is not None
    assert not probe.bypassed
    assert [run.fetches for run in probe.runs] == [1, 2]


def test_a_far_probe_counts_from_far_away_and_holds_the_new_tokens_only() -> None:
    probe = Probe(Watch())
    probe.begin()
    probe.update_and_fetch(X, X)
    probe.begin(far=True)
    assert probe.offset == FAR
    keys, _ = probe.update_and_fetch(X, X)
    assert keys.shape[2] == 3
    assert probe.offset == FAR + 3


def test_touching_the_arrays_is_noticed() -> None:
    for touch in (lambda p: p.keys, lambda p: p.values, lambda p: setattr(p, "keys", X)):
        probe = Probe(Watch())
        probe.begin()
        probe.update_and_fetch(X, X)
        touch(probe)
        assert probe.bypassed


def test_a_probe_that_is_read_before_it_was_written_to_says_so() -> None:
    with pytest.raises(ValueError, match="before it has written"):
        Probe(Watch()).keys_and_values()


def test_attention_over_a_probe_is_noted_and_answered_in_shape() -> None:
    probe = Probe(Watch())
    probe.begin()
    keys, values = probe.update_and_fetch(X, X[..., :5])
    step = step_of(keys, values)
    assert step is not None
    queries = mx.zeros((1, 6, 3, 8), mx.float16)
    masks = ("causal", None, mx.ones((3, 3), mx.bool_), mx.zeros((3, 3)))
    for mask in masks:
        out = step.attend(queries, scale=0.25, mask=mask, sinks=mx.zeros((6,)))
        assert (out.shape, out.dtype) == ((1, 6, 3, 5), mx.float16)
    reads = probe.runs[0].reads
    assert [read.mask for read in reads] == ["causal", "none", "bool", "additive"]
    assert {(read.query_heads, read.scale, read.sinks) for read in reads} == {(6, 0.25, True)}


def test_a_cache_that_is_not_probed_ends_its_layers_rotations() -> None:
    class Cache:
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> str:
            return "fetched"

    watch, cache = Watch(turns=2), Cache()
    watch_writes(cache, watch)
    assert cache.update_and_fetch(X, X) == "fetched"
    assert watch.turns == 0
    watch_writes(object(), watch)  # one without the method is left alone
