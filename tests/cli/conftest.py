from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from tests.fake_site import site

__all__ = ["site"]


@pytest.fixture(autouse=True)
def _mlx_keeps_what_it_kept() -> Iterator[None]:
    """Commands that compute let MLX keep more freed memory, in this process too."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    yield
    mx.set_cache_limit(limit)
