from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.errors import CacheFileError
from tests.stand_ins import LAYER, cache, tokens

SEEN = 300


def held() -> CompressedKVCache:
    made = cache(window=16, warmup=12)
    _, k, v = tokens(SEEN)
    made.update_and_fetch(k, v)
    return made


def changed(state: tuple[Any, ...], **counts: Any) -> tuple[Any, ...]:
    header = json.loads(state[0])
    header["counts"] |= counts
    return json.dumps(header), *state[1:]


def test_a_whole_state_is_taken() -> None:
    other = cache(window=16, warmup=12)
    other.state = held().state
    assert other.offset == SEEN


@pytest.mark.parametrize(
    "array", [1, {}, mx.array(1.0), mx.zeros(3), mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 512, 7))]
)
def test_an_array_of_another_layout_is_refused_in_every_place(array: Any) -> None:
    state = held().state
    for place in range(1, len(state)):
        other = held()
        with pytest.raises(CacheFileError, match=r"layer 0: the state's .* must be"):
            other.state = (*state[:place], array, *state[place + 1 :])
        assert other.offset == SEEN
        assert mx.array_equal(other.keys_and_values()[0], held().keys_and_values()[0])


def test_another_dtype_or_batch_is_refused_in_every_place() -> None:
    state = held().state
    for place in range(1, len(state)):
        for wrong in (state[place].astype(mx.int8), mx.concatenate([state[place]] * 2)):
            with pytest.raises(CacheFileError, match=r"must be|batches of 1, 2"):
                held().state = (*state[:place], wrong, *state[place + 1 :])


def test_a_refused_state_loses_nothing_that_waits_to_be_coded() -> None:
    other = cache(window=16, marked=True, careful_fraction=0.5)
    _, k, v = tokens(SEEN)
    other.update_and_fetch(k, v)
    with pytest.raises(CacheFileError):
        other.state = held().state
    assert other.offset == other.now().tokens == SEEN


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"offset": "x"}, "header is damaged"),
        ({"offset": SEEN + 1}, f"do not hold the {SEEN + 1} tokens"),
        ({"exact": -5}, "header is damaged"),
        ({"exact": 9999}, "exact keys must be .* 9999 or more"),
        ({"tail": 9999}, "must be .* 9999 or more"),
        ({"exact_arrays": 3}, "must hold"),
        ({"constants": None}, "header is damaged"),
        ({"constants": ["k.foreign", "v.mean"]}, "constants are foreign"),
    ],
)
def test_counts_that_the_arrays_do_not_bear_out_are_refused(counts: Any, text: str) -> None:
    with pytest.raises(CacheFileError, match=text):
        held().state = changed(held().state, **counts)


@pytest.mark.parametrize("part", ["counts", "identity"])
def test_a_header_that_lacks_a_part_is_refused(part: str) -> None:
    header, *arrays = held().state
    parts = json.loads(header)
    del parts[part]
    for take in (lambda state: setattr(held(), "state", state), CompressedKVCache.from_state):
        with pytest.raises(CacheFileError, match="not one of a kvcompress cache"):
            take((json.dumps(parts), *arrays))


@pytest.mark.parametrize("layer", [{}, {"rotary": {"dims": 3}}, {"rotary": None, "heads": 1}])
def test_a_layer_that_cannot_be_is_refused(layer: dict[str, Any]) -> None:
    from kvcompress.cache.state import restore
    from kvcompress.registry import get_method

    method = get_method("affine")
    state = CompressedKVCache(method, LAYER, held().codec).state
    header = json.loads(state[0])
    header["identity"]["layer"] = layer
    with pytest.raises(CacheFileError, match="a layer that cannot be"):
        restore((json.dumps(header), *state[1:]))


def test_codes_without_their_constants_are_refused() -> None:
    header, keys, values, *rest = held().state
    names = json.loads(header)["counts"]["constants"]
    assert names
    bare = changed((header, keys, values, *rest[len(names) :]), constants=[])
    with pytest.raises(CacheFileError, match="constants are missing"):
        held().state = bare
