"""Freed memory that MLX keeps for its next arrays."""

from __future__ import annotations

from typing import Final

import mlx.core as mx

CPU_CACHE_BYTES: Final = 1 << 30


def keep_freed_memory() -> None:
    """Let MLX keep up to 1 GiB of freed memory where it computes on a CPU.

    By itself it keeps 32 MB there. What attention to a long context takes is more, and would be
    mapped and zeroed anew at every operation.
    """
    if mx.default_device() == mx.cpu:
        mx.set_cache_limit(CPU_CACHE_BYTES)
