"""a2ats on the real model: what windowed rotation costs, and that queries are worth knowing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcompress as kv
from kvcompress.calibrate import Calibration
from tests.model.conftest import divergence, log_probs

pytestmark = pytest.mark.model


def kl(demo: tuple[Any, Any], ids: list[int], full: np.ndarray, name: str, **options: Any) -> float:
    caches = kv.get_method(name, window=32, **options).make_cache(demo[0])
    found = divergence(full, log_probs(demo[0], caches, ids))
    numbers = kv.report(caches)
    assert numbers.stored_bytes == numbers.predicted_bytes
    return found


def test_bands_cost_little_and_one_rotation_much(
    demo: tuple[Any, Any], ids: list[int], full: np.ndarray, calibration: Calibration
) -> None:
    exact, banded, single = (
        kl(demo, ids, full, "a2ats", codebook_bits=6, rope=rope, calibration=calibration)
        for rope in ("exact", "banded", "single")
    )
    assert banded < 1.3 * exact
    assert single > 2 * banded  # four times at 1,024 tokens


def test_fewer_bits_than_one_beat_one_bit_a_channel(
    demo: tuple[Any, Any], ids: list[int], full: np.ndarray, calibration: Calibration
) -> None:
    vectors = kl(demo, ids, full, "a2ats", codebook_bits=6, calibration=calibration)
    assert vectors < kl(demo, ids, full, "turboquant", bits=1)


def test_mlx_lm_generates_with_an_attached_method(
    demo: tuple[Any, Any], calibration: Calibration
) -> None:
    import mlx_lm

    model, tokenizer = demo
    method = kv.get_method("a2ats", codebook_bits=6, window=16, sinks=2, calibration=calibration)
    with kv.attach(model, method):
        text = mlx_lm.generate(model, tokenizer, "The capital of France is", max_tokens=12)
    assert "Paris" in text
