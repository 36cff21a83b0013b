"""Set-up for the whole suite: BLAS, Hypothesis profiles and the real model."""

from __future__ import annotations

import os

from kvcompress.openblas import prefer_openblas

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker a core: more threads only get in the way
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
prefer_openblas()  # before anything imports mlx

from typing import Any  # noqa: E402

import pytest  # noqa: E402

from kvcompress.testing.profiles import register_profiles  # noqa: E402

register_profiles()


@pytest.fixture(scope="session")
def demo() -> tuple[Any, Any]:
    """The embedded model and its tokenizer, float32 on a CPU, loaded once; mark tests ``model``."""
    from kvcompress.models import load_model

    loaded = load_model(dtype="float32")
    return loaded.model, loaded.tokenizer
