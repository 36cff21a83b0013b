from __future__ import annotations

import mlx.core as mx
import pytest

from kvcompress.models.room import CPU_CACHE_BYTES, keep_freed_memory


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="MLX chooses by itself on a GPU")
def test_mlx_keeps_more_than_one_array_of_a_long_context() -> None:
    limit = mx.set_cache_limit(0)
    try:
        keep_freed_memory()
        mx.clear_cache()
        large = mx.zeros((64 << 20,), mx.uint8)
        mx.eval(large)
        del large
        assert mx.get_cache_memory() >= 64 << 20
        assert mx.set_cache_limit(limit) == CPU_CACHE_BYTES
    finally:
        mx.set_cache_limit(limit)
        mx.clear_cache()
