"""What the tests on the real model share."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.calibrate import Calibration, demo_calibration
from kvcompress.text import encode, load_text

CONTEXT, SCORED = 320, 64
CALIBRATED = ("a2ats:codebook_bits=6", "vecinfer:bits=1.0", "commvq:bits=1")


@pytest.fixture(scope="session")
def ids(demo: tuple[Any, Any]) -> list[int]:
    return encode(demo[1], load_text("prose-eval").content[:8000])[: CONTEXT + SCORED]


@pytest.fixture(scope="session")
def calibration() -> Calibration:
    """Small tables of every calibrated method, of other text than is scored."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "commvq: .* tokens are few", UserWarning)
        return demo_calibration(CALIBRATED, tokens=2048)


def log_probs(model: Any, caches: list[Any], ids: list[int]) -> np.ndarray:
    """Of the last ``SCORED`` tokens' successors, the context read in two chunks."""
    rows = []
    for start, stop in [(0, 200), (200, CONTEXT), (CONTEXT, CONTEXT + SCORED)]:
        logits = model(mx.array([ids[start:stop]]), cache=caches)[0].astype(mx.float32)
        rows.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    return rows[-1]


@pytest.fixture(scope="session")
def full(demo: tuple[Any, Any], ids: list[int]) -> np.ndarray:
    from mlx_lm.models.cache import make_prompt_cache

    return log_probs(demo[0], make_prompt_cache(demo[0]), ids)


def divergence(full: np.ndarray, other: np.ndarray) -> float:
    return float((np.exp(full) * (full - other)).sum(-1).mean())
