"""What is promised to whoever computes with it is made once a block, and holds no memory."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.promise import Promise
from kvcompress.cache.walk import reachable_arrays
from tests.stand_ins import cache, tokens

BLOCK = 8


def a_promise() -> Promise:
    ones = mx.ones((1, 2, 4, 8))
    mx.eval(ones)
    return Promise((ones + 1, ones * 3))


def step(held: CompressedKVCache, *, compute: bool = False, attend: bool = True) -> None:
    """A token, read as codes or as arrays or both."""
    q, k, v = tokens(1)
    keys, values = held.update_and_fetch(k, v)
    if attend:
        mx.eval(keys.step.attend(q, scale=1.0))
    if compute:
        mx.eval(keys + 1, values + 1)


def prefilled(count: int = 64) -> CompressedKVCache:
    held = cache(window=4, block=BLOCK, sinks=0)
    _, k, v = tokens(count + 4)
    held.update_and_fetch(k, v)
    return held


def test_computing_one_of_the_arrays_is_noticed() -> None:
    for which in range(2):
        promise = a_promise()
        assert promise.arrays is not None
        assert not promise.kept
        beside = promise.arrays[which] - 1
        assert not promise.kept
        mx.eval(beside)
        assert promise.kept


def test_nothing_is_kept_of_what_nobody_wanted() -> None:
    assert not Promise().kept


def test_a_walk_counts_what_was_computed_alone() -> None:
    promise = a_promise()
    assert list(reachable_arrays([promise])) == []
    assert promise.arrays is not None
    mx.eval(promise.arrays)
    assert len(list(reachable_arrays([promise]))) == 2


def test_steps_share_a_promise_until_more_is_coded() -> None:
    held = prefilled()
    seen = []
    for _ in range(2 * BLOCK + 1):
        step(held)
        seen.append((held.tokens_coded, held._promise))
    promises = {id(p) for _, p in seen if p is not None}
    assert len(promises) <= len({coded for coded, _ in seen}) == 3
    assert len(promises) < len(seen)


def test_another_thread_makes_its_own() -> None:
    held = prefilled()
    step(held)
    before = held._promise
    work = threading.Thread(target=step, args=(held,))
    work.start()
    work.join()
    assert before is not None
    assert held._promise is not before


def test_a_model_that_computes_too_keeps_nothing_decoded() -> None:
    held = prefilled()
    for _ in range(3 * BLOCK + 5):
        step(held, compute=True)
    assert sum(a.nbytes for a in reachable_arrays([held])) <= held.nbytes


def test_a_model_that_only_computes_shares_none() -> None:
    held = prefilled()
    step(held, attend=False, compute=True)
    before = held._promise
    step(held, attend=False, compute=True)
    assert held._promise is not before


def test_the_arrays_are_those_of_the_codes_as_they_stand() -> None:
    held = prefilled()
    for taken in (0, 3, 20):
        step(held)
        held.trim(taken)
        step(held)
        twin = CompressedKVCache.from_state(held.state)
        _, k, v = tokens(1)
        for a, b in zip(held.update_and_fetch(k, v), twin.update_and_fetch(k, v), strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))
