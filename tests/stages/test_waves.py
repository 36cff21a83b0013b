"""Scores of a rotated mean."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.stages.centre import rotated
from kvcompress.stages.waves import Waves
from tests.stages.rope_cases import DIM, HEADS, ROTATIONS, largest, normal

TURNING = {kind: rotary for kind, rotary in ROTATIONS.items() if rotary is not None}


@given(
    st.sampled_from(sorted(TURNING)),
    st.integers(0, 131_072) | st.integers(4080, 4110),
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(0, 99),
)
def test_scores_are_those_of_the_rotated_mean(
    kind: str, start: int, count: int, queries: int, seed: int
) -> None:
    rotary, positions = TURNING[kind], range(start, start + count)
    q, mean = normal(2, HEADS, queries, DIM, seed=seed), normal(2, HEADS, 1, DIM, seed=seed + 1)
    got = Waves.of(q, mean, rotary).at(positions)
    assert got.shape == (2, HEADS, queries, count)
    assert got.dtype == mx.float32
    assert largest(got - q @ rotated(mean, rotary, positions).swapaxes(-1, -2)) < 1e-4


@pytest.mark.parametrize("kind", sorted(TURNING))
def test_a_long_run_is_its_pieces(kind: str) -> None:
    q, mean = normal(1, HEADS, 2, DIM), normal(1, HEADS, 1, DIM, seed=1)
    waves = Waves.of(q, mean, TURNING[kind])
    pieces = [waves.at(range(a, b)) for a, b in ((7, 4103), (4103, 8199), (8199, 8300))]
    assert largest(waves.at(range(7, 8300)) - mx.concatenate(pieces, axis=-1)) < 1e-4
