from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.layers import Rotary
from kvcompress.stages.pairs import join_pairs, split_pairs

ROTATIONS = [
    Rotary(12),
    Rotary(12, traditional=True),
    Rotary(8),
    Rotary(8, traditional=True),
    None,
]


@pytest.mark.parametrize("rotary", ROTATIONS)
def test_pairs_are_those_that_turn_together(rotary: Rotary | None) -> None:
    x = mx.array(np.random.default_rng(0).standard_normal((2, 3, 5, 12)).astype(np.float32))
    first, second, rest = split_pairs(x, rotary)
    assert mx.array_equal(join_pairs(first, second, rest, rotary), x)
    assert rest.shape[-1] == (12 - rotary.dims if rotary else 12)
    if rotary is not None:
        turned = split_pairs(rotary.rotate(x, [7] * 5), rotary)
        phases = np.exp(7j * rotary.angles)
        expected = (np.array(first) + 1j * np.array(second)) * phases
        np.testing.assert_allclose(turned[0], expected.real, atol=1e-5)
        np.testing.assert_allclose(turned[1], expected.imag, atol=1e-5)
        assert mx.array_equal(turned[2], rest)


def test_numpy_arrays_are_split_alike() -> None:
    parts = split_pairs(np.arange(10), Rotary(8))
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    parts = split_pairs(np.arange(10), Rotary(8, traditional=True))
    assert [part.tolist() for part in parts] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9]]
