from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from kvcompress.cache.view import View, step_of, view

STEP, OTHER = object(), object()


def views(step: Any = STEP) -> tuple[View, View]:
    x = mx.zeros((1, 2, 3, 4))
    return view(x, step, "key"), view(x, step, "value")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_view_is_its_dense_array_bit_for_bit(dtype: mx.Dtype) -> None:
    dense = mx.random.normal((1, 2, 5, 8)).astype(dtype)
    tagged = view(dense, STEP, "key")  # type: ignore[arg-type]
    assert tagged.dtype == dtype
    assert tagged.shape == dense.shape
    assert mx.array_equal(tagged, dense)
    assert (tagged.step, tagged.part) == (STEP, "key")


def test_any_operation_gives_a_plain_array() -> None:
    keys, _ = views()
    for result in (keys + 1, keys[..., :2], keys.swapaxes(1, 2), mx.concatenate([keys, keys])):
        assert type(result) is mx.array


def test_making_a_view_computes_nothing_and_computing_it_copies_nothing() -> None:
    mx.clear_cache()
    held, size = mx.get_active_memory(), 4 << 20
    lazy = mx.ones((size // 4,)).reshape(1, 1, -1, 64) + 1
    tagged = view(lazy, STEP, "key")  # type: ignore[arg-type]
    assert mx.get_active_memory() - held < size // 4
    mx.eval(lazy)
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    mx.eval(tagged)
    assert mx.get_peak_memory() - held < size // 4


def test_writing_into_a_view_leaves_the_dense_array_alone() -> None:
    dense = mx.zeros((1, 1, 2, 2))
    tagged = view(dense, STEP, "key")  # type: ignore[arg-type]
    tagged[...] = 1.0
    assert mx.array_equal(dense, mx.zeros((1, 1, 2, 2)))


def test_only_keys_and_values_of_one_step_in_their_places_have_a_step() -> None:
    keys, values = views()
    theirs, _ = views(OTHER)
    plain = mx.zeros((1, 2, 3, 4))
    assert step_of(keys, values) is STEP
    for pair in (
        (values, keys),
        (keys, keys),
        (values, values),
        (theirs, values),
        (keys, plain),
        (plain, values),
        (plain, plain),
        (keys + 0, values + 0),
    ):
        assert step_of(*pair) is None
