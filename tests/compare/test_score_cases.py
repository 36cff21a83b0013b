from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcompress.compare.score_cases import LAYER, RECENT, SEEDS, TOKENS, made_up_cases


def plain(case: Any) -> tuple[np.ndarray, np.ndarray]:
    """Keys ``(n, D)`` and the query ``(D,)`` before RoPE."""
    tokens = case.keys.shape[2]
    last = range(tokens - 1, tokens)
    keys = np.array(LAYER.rotary.unrotate(case.keys, range(tokens)))[0, 0]
    return keys, np.array(LAYER.rotary.unrotate(case.queries, last))[0, 0, 0]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("workload", ["local_recency", "long_range_dependent"])
def test_the_query_asks_for_a_tenth_of_the_keys(workload: str, tokens: int) -> None:
    for case in made_up_cases(workload, tokens):
        assert case.keys.shape == case.values.shape == (1, 1, tokens, 32)
        keys, query = plain(case)
        alike = np.flatnonzero(np.square(keys - query).sum(axis=1) < 0.5)
        # Where the last tokens would run past the end, they are cut.
        near = range(tokens - RECENT, min(tokens - RECENT + tokens // 10, tokens))
        far = range(tokens // 10)
        assert alike.tolist() == list(near if workload == "local_recency" else far)
        others = np.delete(keys, alike, axis=0)
        assert others.std() == pytest.approx(0.3, rel=0.05)
        assert np.abs(others.mean()) < 0.02
        assert (keys[alike] - query).std() == pytest.approx(np.hypot(0.05, 0.02), rel=0.2)


def test_tables_are_fitted_to_these_very_tokens() -> None:
    for case in made_up_cases("local_recency", 200):
        keys, query = plain(case)
        assert np.allclose(case.samples.keys[:, 0], keys, atol=1e-5)
        assert np.allclose(case.samples.queries[0, 0, 0], query, atol=1e-5)
        assert case.samples.query_positions.tolist() == [199]


def test_seeds_differ_and_are_the_same_every_time() -> None:
    first, second = (list(made_up_cases("long_range_dependent", 200)) for _ in range(2))
    assert [case.name for case in first] == [f"seed {seed}" for seed in SEEDS]
    arrays = [np.array(case.keys) for case in first]
    assert all(np.array_equal(a, case.keys) for a, case in zip(arrays, second, strict=True))
    assert all(not np.array_equal(arrays[0], other) for other in arrays[1:])
