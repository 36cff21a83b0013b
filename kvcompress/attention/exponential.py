"""The exponential of softmax, by the route that is fastest on the device."""

from __future__ import annotations

import math

import mlx.core as mx

from kvcompress.stages.device import on_cpu

_LOG2_E = math.log2(math.e)


def exponential(x: mx.array) -> mx.array:
    """``exp(x)`` of float32 numbers that are not positive.

    On a CPU as a power of two, which MLX computes three times as fast there; the factor's rounding
    costs a relative error of ``|x|`` times 6e-8.
    """
    return mx.power(2.0, x * _LOG2_E) if on_cpu() else mx.exp(x)
