from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvcompress.attention.exponential import exponential


def test_it_is_the_exponential_to_round_off() -> None:
    x = np.linspace(-80, 0, 4001).astype(np.float32)
    found = np.array(exponential(mx.array(x))).astype(np.float64)
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=2e-5)


def test_nothing_is_one_and_the_lowest_number_is_nothing() -> None:
    lowest = mx.finfo(mx.float32).min
    assert exponential(mx.array([0.0, -0.0, lowest, -float("inf")])).tolist() == [1, 1, 0, 0]
