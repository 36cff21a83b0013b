from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.cache.store import SEAL, CodeStore, ExactRows, write
from kvcompress.schema import Field, Schema

SCHEMA = Schema((Field("k.codes", "uint32", 1, 2, 32), Field("v.gain", "uint16", 1, 1)))


def codes(start: int, count: int) -> dict[str, mx.array]:
    row = mx.arange(start, start + count)
    return {
        "k.codes": mx.broadcast_to(row[None, None, :, None], (1, 2, count, 1)).astype(mx.uint32),
        "v.gain": row[None, None, :, None].astype(mx.uint16),
    }


def held(store: CodeStore) -> list[int]:
    out: list[int] = []
    for fields, count in store.blocks():
        assert all(a.shape[2] == count for a in fields.values())
        rows = np.array(fields["k.codes"])[0]
        assert (rows[0] == rows[1]).all()
        out += rows[0, :, 0].tolist()
    return out


@given(st.lists(st.sampled_from([1, 5, 32, 300, SEAL - 1, SEAL, SEAL + 7]), max_size=6))
def test_appending_in_any_pieces_holds_the_same_tokens(pieces: list[int]) -> None:
    store, seen = CodeStore(SCHEMA), 0
    for count in pieces:
        store.append(codes(seen, count), count)
        seen += count
    assert store.tokens == seen
    assert held(store) == list(range(seen))
    assert len(store.sealed) == seen // SEAL


@given(st.integers(0, 2 * SEAL + 40), st.integers(0, 50))
def test_keeping_a_prefix_then_appending(kept: int, more: int) -> None:
    store = CodeStore(SCHEMA)
    store.append(codes(0, 2 * SEAL + 40), 2 * SEAL + 40)
    store.keep(kept)
    assert held(store) == list(range(kept))
    store.append(codes(kept, more), more)
    assert held(store) == list(range(kept + more))


def test_room_is_bounded_by_a_step() -> None:
    store = CodeStore(SCHEMA)
    for seen in range(0, 1000, 10):
        store.append(codes(seen, 10), 10)
        assert 0 <= store.capacity - store.used < 256


def test_a_snapshot_does_not_see_later_writes() -> None:
    store = CodeStore(SCHEMA)
    store.append(codes(0, 10), 10)
    (before, _), *_ = store.blocks()
    store.keep(4)
    store.append(codes(100, 6), 6)
    assert np.array(before["k.codes"])[0, 0, :, 0].tolist() == list(range(10))
    assert held(store) == [0, 1, 2, 3, *range(100, 106)]


def test_copies_are_independent_both_ways() -> None:
    store = CodeStore(SCHEMA)
    store.append(codes(0, 10), 10)
    other = store.copy()
    other.append(codes(50, 3), 3)
    store.append(codes(90, 2), 2)
    assert held(other) == [*range(10), 50, 51, 52]
    assert held(store) == [*range(10), 90, 91]


def test_exact_rows_grow_to_their_steady_size_and_stay() -> None:
    rows, one = ExactRows(), mx.ones((1, 2, 1, 4))
    sizes = set()
    for _ in range(40):
        rows.append(one, one, 40)
        assert rows.keys is not None
        sizes.add(rows.keys.shape[2])
    assert sizes == {40}
    rows.append(one, one, 40)
    assert rows.rows()[0].shape[2] == 41


def test_writing_leaves_the_old_buffer_alone() -> None:
    old = mx.zeros((1, 1, 4, 2))
    new = write(old, mx.ones((1, 1, 2, 2)), 1)
    assert np.array(old).sum() == 0
    assert np.array(new)[0, 0, :, 0].tolist() == [0, 1, 1, 0]


def test_writing_happens_in_place_when_nobody_else_holds_the_buffer() -> None:
    buffer, row = mx.zeros((1, 8, 4096, 128)), mx.ones((1, 8, 1, 128))
    mx.eval(buffer, row)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for place in range(8):
        buffer = write(buffer, row, place)
        mx.eval(buffer)
    assert mx.get_peak_memory() - before < buffer.nbytes / 8
