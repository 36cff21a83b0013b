from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.cache.batch import CompressedBatchCache
from kvcompress.errors import BatchError, CacheFileError, ConfigError
from tests.stand_ins import LAYER, cache, largest, tokens

SCALE = 0.17


def history(count: int, seed: int, **options: int):
    held = cache(**options)
    _, k, v = tokens(count, seed=seed)
    if count:
        held.update_and_fetch(k, v)
    return held


@given(
    lengths=st.lists(st.sampled_from([0, 3, 20, 45, 80]), min_size=1, max_size=3),
    steps=st.lists(st.sampled_from([1, 1, 6]), min_size=1, max_size=4),
    window=st.sampled_from([0, 16, 1000]),
)
def test_rows_of_a_batch_are_the_rows_run_alone(
    lengths: list[int], steps: list[int], window: int
) -> None:
    alone = [history(n, i, window=window, steps=4.0) for i, n in enumerate(lengths)]
    batch = alone[0].merge([history(n, i, window=window, steps=4.0) for i, n in enumerate(lengths)])
    for number, count in enumerate(steps):
        q, k, v = tokens(count, seed=100 + number, batch=len(lengths))
        assert batch.offset.tolist() == [c.offset for c in alone]
        mask = batch.make_mask(count)
        cut = any(c.coded_after(count - 1) > c.coded_after(0) for c in alone)
        keys, values = batch.update_and_fetch(k, v)
        out = keys.step.attend(q, scale=SCALE, mask=mask)
        if not cut:  # else it is read as if token by token
            dense = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE, mask=mask)
            assert largest(out - dense) < 1e-4
        for i, single in enumerate(alone):
            row = slice(i, i + 1)
            own, _ = single.update_and_fetch(k[row], v[row])
            expected = own.step.attend(q[row], scale=SCALE, mask="causal" if count > 1 else None)
            assert mx.array_equal(out[row], expected)
    for i, single in enumerate(alone):
        for a, b in zip(batch.extract(i).keys_and_values(), single.keys_and_values(), strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))
    assert batch.nbytes == sum(c.nbytes for c in alone)


@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=3), chunk=st.sampled_from([7, 64]))
def test_right_padding_is_never_stored(lengths: list[int], chunk: int) -> None:
    longest = max(lengths)
    _, k, v = tokens(longest, batch=len(lengths))
    batch = CompressedBatchCache([history(0, 0) for _ in lengths])
    batch.prepare(lengths=lengths, right_padding=[longest - n for n in lengths])
    for start in range(0, longest, chunk):
        batch.update_and_fetch(k[:, :, start : start + chunk], v[:, :, start : start + chunk])
    batch.finalize()
    assert batch.offset.tolist() == lengths
    for i, count in enumerate(lengths):
        single = cache()
        single.update_and_fetch(k[i : i + 1, :, :count], v[i : i + 1, :, :count])
        a, _ = batch.extract(i).keys_and_values()
        b, _ = single.keys_and_values()
        assert mx.array_equal(a, b)


def test_left_padding_shifts_positions_and_is_never_stored() -> None:
    batch = CompressedBatchCache([history(0, 0), history(0, 0)])
    batch.prepare(left_padding=[2, 0])
    assert batch.offset.tolist() == [-2, 0]
    q, k, v = tokens(5, batch=2)
    mask = batch.make_mask(5)
    keys, values = batch.update_and_fetch(k, v)
    out = keys.step.attend(q, scale=SCALE, mask=mask)
    dense = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE, mask=mask)
    assert batch.offset.tolist() == [3, 5]
    assert largest(out[0, :, :2]) == 0
    assert largest((out - dense)[:, :, 2:]) < 1e-4
    with pytest.raises(BatchError, match="empty batch"):
        batch.prepare(left_padding=[1, 1])


def test_windowed_and_array_masks_are_cut_to_each_row() -> None:
    batch = history(30, 0).merge([history(30, 0), history(11, 1)])
    q, k, v = tokens(4, batch=2)
    for mask in (batch.make_mask(4, window_size=9), mx.array(np.array(batch.make_mask(4)))):
        keys, values = batch.update_and_fetch(k, v)
        out = keys.step.attend(q, scale=SCALE, mask=mask)
        dense = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE, mask=mask)
        assert largest(out - dense) < 1e-4
        batch.trim(4)


def test_filter_and_extend_move_whole_rows() -> None:
    batch = history(5, 0).merge([history(n, n) for n in (5, 9, 60)])
    batch.filter([2, 0])
    assert batch.offset.tolist() == [60, 5]
    batch.extend(history(7, 7).merge([history(7, 7)]))
    assert batch.offset.tolist() == [60, 5, 7]
    assert batch.size() == 60
    other = CompressedBatchCache.from_state(batch.state)
    assert other.offset.tolist() == [60, 5, 7]
    assert batch.trim(6) == 6
    assert batch.offset.tolist() == [54, 0, 1]


def test_merging_copies() -> None:
    single = history(30, 0)
    batch = single.merge([single])
    _, k, v = tokens(5)
    batch.update_and_fetch(k, v)
    assert single.offset == 30


def test_what_does_not_fit_together_is_refused() -> None:
    from mlx_lm.models.cache import KVCache

    with pytest.raises(BatchError, match="KVCache"):
        history(1, 0).merge([history(1, 0), KVCache()])
    with pytest.raises(BatchError, match="share method"):
        history(1, 0).merge([history(1, 0), cache(evolve(LAYER, index=2))])
    batch = history(1, 0).merge([history(1, 0)])
    with pytest.raises(BatchError, match="has 1 rows"):
        batch.update_and_fetch(mx.zeros((2, 2, 1, 32)), mx.zeros((2, 2, 1, 16)))


def test_a_chunk_that_does_not_fit_is_taken_by_no_row() -> None:
    batch = CompressedBatchCache([history(20, i) for i in range(3)])
    _, k, v = tokens(5, batch=3)
    for keys, values in ((k, v[:2]), (k[..., :3], v), (k, v[:, :, :2]), (None, None)):
        with pytest.raises(ConfigError):
            batch.update_and_fetch(keys, values)
        assert [row.offset for row in batch.rows] == [20] * 3


def test_a_state_that_does_not_fit_is_taken_by_no_row() -> None:
    batch = CompressedBatchCache([history(20, i) for i in range(2)])
    other = CompressedBatchCache([history(30, i) for i in range(2)])
    for state in (5, None, other.state[:1], (other.state[0], "nonsense")):
        with pytest.raises(CacheFileError):
            batch.state = state  # type: ignore[assignment]
        assert [row.offset for row in batch.rows] == [20] * 2
    with pytest.raises(CacheFileError):
        CompressedBatchCache.from_state(5)  # type: ignore[arg-type]


def test_rows_that_there_are_not_are_named() -> None:
    batch = CompressedBatchCache([history(20, i) for i in range(2)])
    for number in (2, -3, 0.5, "a", None):
        with pytest.raises(BatchError, match="the batch has 2 rows"):
            batch.extract(number)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match="the batch has 2 rows"):
            batch.filter([0, number])
    assert batch.extract(-1).offset == 20
    batch.filter(mx.array([1, 0]))
    batch.filter([])
    _, k, v = tokens(1)
    with pytest.raises(BatchError, match="no rows left"):
        batch.update_and_fetch(k, v)


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [-1, 0]])
def test_padding_that_is_not_one_count_a_row_is_refused(counts: list[int]) -> None:
    batch = CompressedBatchCache([history(0, i) for i in range(2)])
    with pytest.raises(BatchError, match="must be 2 integers of at least 0, one a row"):
        batch.prepare(left_padding=counts)
    with pytest.raises(BatchError, match="must be 2 integers of at least 0, one a row"):
        batch.prepare(lengths=counts, right_padding=[1, 0])


@pytest.mark.parametrize("count", [0, 3, 20, 45, 80])
def test_an_extracted_row_has_no_room_and_goes_on_as_if_it_had(count: int) -> None:
    """Short conversations that are kept would each hold the room of a long one."""
    row = CompressedBatchCache([history(count, 0), history(7, 1)]).extract(0)
    assert row.nbytes == row.report.predicted_bytes
    single = history(count, 0)
    for number in range(3):
        q, k, v = tokens(1 + 30 * number, seed=10 + number)
        outs = []
        for held in (row, single):
            keys, _ = held.update_and_fetch(k, v)
            outs.append(keys.step.attend(q, scale=SCALE, mask="causal"))
        assert mx.array_equal(*outs)
    assert row.nbytes == single.nbytes


def test_an_extracted_row_lets_go_of_what_the_batch_holds() -> None:
    batch = CompressedBatchCache([history(80, 0)])
    mx.eval(batch.state[0][1:])
    row = batch.extract(0)
    del batch
    before = mx.get_active_memory()
    size = row.nbytes
    del row
    assert before - mx.get_active_memory() >= size


def test_a_row_that_is_named_twice_goes_on_as_two() -> None:
    q, new, more = tokens(3, seed=5, batch=2)
    batch = CompressedBatchCache([history(50, 1), history(20, 2)])
    batch.filter([0, 0])
    both = history(50, 1)
    keys, _ = batch.update_and_fetch(new, more)
    out = keys.step.attend(q, scale=SCALE, mask=batch.make_mask(3))
    own, _ = both.update_and_fetch(new[1:], more[1:])
    assert batch.offset.tolist() == [53, 53]
    assert largest(out[1:] - own.step.attend(q[1:], scale=SCALE, mask="causal")) < 1e-5
    batch.extend(batch)
    assert len({id(row) for row in batch.rows}) == 4


@pytest.mark.parametrize(
    ("queries", "mask", "message"),
    [
        ((3, 6, 3, 32), None, r"shape \(2, n \* 2, L, 32\)"),
        ((1, 6, 3, 32), None, r"shape \(2, n \* 2, L, 32\)"),
        ((2, 3, 32), None, r"shape \(2, n \* 2, L, 32\)"),
        ((2, 6, 5, 32), None, "those of its chunk of 3"),
        ((2, 6, 2, 32), None, "those of its chunk of 3"),
        ((2, 6, 3, 32), (3, 200), r"mask must end in \(3, 53\)"),
        ((2, 6, 3, 32), (3, 3, 53), r"mask must end in \(3, 53\)"),
        ((2, 6, 3, 32), (), r"mask must end in \(3, 53\)"),
    ],
)
def test_what_does_not_fit_the_rectangle_is_refused(
    queries: tuple[int, ...], mask: tuple[int, ...] | None, message: str
) -> None:
    batch = CompressedBatchCache([history(50, 1), history(20, 2)])
    _, new, more = tokens(3, seed=5, batch=2)
    keys, _ = batch.update_and_fetch(new, more)
    given_mask = None if mask is None else mx.zeros(mask)
    with pytest.raises(ConfigError, match=message):
        keys.step.attend(mx.zeros(queries), scale=SCALE, mask=given_mask)


@pytest.mark.parametrize("counts", [5, "ab", [1.5, 2], [True, 1], [1], [1, -1], ["a", "b"]])
@pytest.mark.parametrize("name", ["left_padding", "lengths", "right_padding"])
def test_counts_that_cannot_be_are_refused(name: str, counts: object) -> None:
    batch = CompressedBatchCache([history(0, 1), history(0, 2)])
    with pytest.raises(BatchError, match="2 integers of at least 0, one a row"):
        batch.prepare(**{name: counts})


def test_counts_may_be_arrays_and_an_emptied_batch_has_none() -> None:
    batch = CompressedBatchCache([history(0, 1), history(0, 2)])
    batch.prepare(left_padding=mx.array([2, 0]))
    assert batch.offset.tolist() == [-2, 0]
    batch.filter([])
    batch.prepare(right_padding=[], lengths=[])


def test_rows_are_not_added_amid_right_padding() -> None:
    batch, other = (CompressedBatchCache([history(9, i), history(20, 2)]) for i in range(2))
    batch.prepare(lengths=[3, 1], right_padding=[0, 2])
    with pytest.raises(BatchError, match="finalized"):
        batch.extend(other)
    with pytest.raises(BatchError, match="finalized"):
        other.extend(batch)
    batch.finalize()
    batch.extend(other)
    assert len(batch.rows) == 4


@pytest.mark.parametrize("end", ["filter", "trim", "extend", "state"])
def test_a_shared_step_ends_with_what_changes_the_batch(end: str) -> None:
    rows = [history(50, 1), history(20, 2)]
    for row in rows:
        row.shared = True
    batch = CompressedBatchCache(rows)
    batch.update_and_fetch(*tokens(3, seed=5, batch=2)[1:])
    assert batch.keys_and_values()[0].shape[2] == 53
    if end == "filter":
        batch.filter([1])
    elif end == "trim":
        batch.trim(2)
    elif end == "extend":
        batch.extend(CompressedBatchCache([history(7, 3)]))
    else:
        batch.state = tuple(row.state for row in batch.rows)
    with pytest.raises(BatchError, match="within a step"):
        batch.keys_and_values()
