from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.calibrate.selection import choose_rows

lengths = st.lists(st.integers(0, 40), max_size=6)


@given(lengths, st.integers(0, 100), st.integers(0, 5), st.integers(0, 9))
def test_as_many_as_asked_or_as_there_are(
    lengths: list[int], limit: int, skip: int, seed: int
) -> None:
    rows = choose_rows(lengths, limit, skip=skip, seed=seed)
    assert len(rows) == len(lengths)
    for chosen, length in zip(rows, lengths, strict=True):
        assert (np.diff(chosen) > 0).all()
        assert ((chosen >= skip) & (chosen < length)).all()
    there = sum(max(length - skip, 0) for length in lengths)
    assert sum(map(len, rows)) == min(limit, there)


@given(lengths, st.integers(0, 60), st.integers(0, 9))
def test_a_larger_sample_holds_the_smaller(lengths: list[int], limit: int, seed: int) -> None:
    few = choose_rows(lengths, limit, skip=2, seed=seed)
    more = choose_rows(lengths, limit + 7, skip=2, seed=seed)
    assert all(set(a) <= set(b) for a, b in zip(few, more, strict=True))


def test_the_choice_is_even_and_follows_the_seed() -> None:
    rows = choose_rows([1000] * 8, 2000, skip=0, seed=3)
    assert all(200 < len(chosen) < 300 for chosen in rows)
    again, other = (choose_rows([1000] * 8, 2000, skip=0, seed=s) for s in (3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(rows, other, strict=True))
