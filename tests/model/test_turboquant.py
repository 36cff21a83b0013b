"""turboquant on the real model: what it keeps, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcompress as kv
from tests.model.conftest import divergence, log_probs

pytestmark = pytest.mark.model


def test_a_window_over_everything_changes_no_bit(
    demo: tuple[Any, Any], ids: list[int], full: np.ndarray
) -> None:
    caches = kv.get_method("turboquant", window=len(ids)).make_cache(demo[0])
    np.testing.assert_array_equal(log_probs(demo[0], caches, ids), full)


def test_more_bits_bring_predictions_nearer_to_full_precision(
    demo: tuple[Any, Any], ids: list[int], full: np.ndarray
) -> None:
    found = []
    for bits in (2, 3, 4):
        caches = kv.get_method("turboquant", bits=bits, window=32).make_cache(demo[0])
        found.append(divergence(full, log_probs(demo[0], caches, ids)))
        numbers = kv.report(caches)
        assert numbers.stored_bytes == numbers.predicted_bytes
        assert numbers.tokens_exact < 4 + 32 + 32
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.02


def test_the_mean_of_the_sequence_pays_at_two_bits(
    demo: tuple[Any, Any], ids: list[int], full: np.ndarray
) -> None:
    with_mean, without = (
        kv.get_method("turboquant", bits=2, window=32, centre=centre).make_cache(demo[0])
        for centre in ("sequence", "none")
    )
    assert divergence(full, log_probs(demo[0], with_mean, ids)) < divergence(
        full, log_probs(demo[0], without, ids)
    )


def test_mlx_lm_generates_with_an_attached_method(demo: tuple[Any, Any]) -> None:
    import mlx_lm

    model, tokenizer = demo
    with kv.attach(model, kv.get_method("turboquant", bits=4, window=16, sinks=2)):
        text = mlx_lm.generate(model, tokenizer, "The capital of France is", max_tokens=12)
    assert "Paris" in text
