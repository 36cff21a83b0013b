from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np

from kvcompress.stages.shared import shared_table
from kvcompress.testing.threads import in_thread


def test_equal_contents_are_one_array() -> None:
    values = np.arange(12.0).reshape(3, 4)
    first = shared_table(values)
    assert shared_table(values.copy()) is first
    assert shared_table(values.reshape(4, 3)) is not first
    assert shared_table(values.astype(np.float16)).dtype == mx.float16
    assert first.dtype == mx.float32


def test_contents_that_are_not_contiguous_are_read_in_order() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4).T
    np.testing.assert_array_equal(np.array(shared_table(values)), values)


def test_a_table_goes_with_its_last_user() -> None:
    values = np.full(1 << 16, 0.5, np.float32)
    mx.synchronize()
    before = mx.get_active_memory()
    held = shared_table(values)
    assert mx.get_active_memory() >= before + held.nbytes
    del held
    gc.collect()
    assert mx.get_active_memory() <= before


def test_a_table_serves_other_threads() -> None:
    table = shared_table(np.ones(5, np.float32))
    assert in_thread(lambda: mx.eval(table + 1)) is None
