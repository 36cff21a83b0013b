"""Where MLX computes."""

from __future__ import annotations

import mlx.core as mx


def on_cpu() -> bool:
    """Whether MLX computes on the CPU unless told otherwise."""
    return bool(mx.default_device().type == mx.cpu)
