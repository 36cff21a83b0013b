"""Every calibrated method on the real model, each at one bit a channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcompress as kv
from kvcompress.calibrate import Calibration
from tests.model.conftest import divergence, log_probs

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    ("name", "options"),
    [("a2ats", {"codebook_bits": 6}), ("vecinfer", {"bits": 1.0}), ("commvq", {"bits": 1})],
)
def test_tables_that_are_fitted_beat_random_ones_by_far(
    demo: tuple[Any, Any],
    ids: list[int],
    full: np.ndarray,
    calibration: Calibration,
    name: str,
    options: dict[str, Any],
) -> None:
    found = {}
    for kind, extra in (
        ("fitted", {"calibration": calibration}),
        ("random", {"codebook": "random"}),
    ):
        caches = kv.get_method(name, window=32, **options, **extra).make_cache(demo[0])
        found[kind] = divergence(full, log_probs(demo[0], caches, ids))
        numbers = kv.report(caches)
        assert numbers.stored_bytes == numbers.predicted_bytes
        assert numbers.assigned_avg_bits <= 1.0
    assert found["fitted"] < 0.12
    assert found["random"] > 4 * found["fitted"]
