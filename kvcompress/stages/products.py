"""Products of few rows with many vectors, by the route that is fastest on the device.

OpenBLAS's complex product of few rows takes less time than its real one, though it multiplies
twice as much. So on a CPU neighbouring channels are taken for one complex number: a view, no copy.
Of numbers that are not finite both of a pair become NaN.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from kvcompress.openblas import openblas_answers
from kvcompress.stages.device import on_cpu

_MOST_ROWS = 8
_LEAST_CHANNELS = 32
_LEAST_NUMBERS = 1 << 16


def complex_pays(rows: int) -> bool:
    """Whether products of so many rows take less time with complex numbers."""
    return rows <= _MOST_ROWS and on_cpu() and _openblas()


def dots(q: mx.array, x: mx.array) -> mx.array:
    """``q @ x^T``: ``(B, H, M, D)`` and ``(B, H, T, D)`` float32 to ``(B, H, M, T)``."""
    if not _pays(q.shape[2], x):
        return q @ x.swapaxes(-1, -2)
    turned = mx.conj(q.view(mx.complex64))
    return mx.real(turned @ x.view(mx.complex64).swapaxes(-1, -2))


def sums(weights: mx.array, x: mx.array) -> mx.array:
    """``p @ x``: ``(B, H, M, T)`` and ``(B, H, T, D)`` float32 to ``(B, H, M, D)``."""
    if not _pays(weights.shape[2], x):
        return weights @ x
    return (weights.astype(mx.complex64) @ x.view(mx.complex64)).view(mx.float32)


def _pays(rows: int, x: mx.array) -> bool:
    channels = x.shape[-1]
    fits = channels % 2 == 0 and channels >= _LEAST_CHANNELS and x.size >= _LEAST_NUMBERS
    return fits and complex_pays(rows)


@lru_cache(maxsize=1)
def _openblas() -> bool:
    return openblas_answers()
