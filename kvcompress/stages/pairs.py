"""The pairs of channels that RoPE turns together, apart and joined again."""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx
import numpy as np

from kvcompress.layers import Rotary

Array = TypeVar("Array", mx.array, np.ndarray)


def split_pairs(x: Array, rotary: Rotary | None) -> tuple[Array, Array, Array]:
    """First and second channels of the pairs, ``(..., P)`` each, and the rest ``(..., Q)``."""
    dims = 0 if rotary is None else rotary.dims
    if rotary is not None and rotary.traditional:
        return x[..., 0:dims:2], x[..., 1:dims:2], x[..., dims:]
    return x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]


def join_pairs(
    first: mx.array, second: mx.array, rest: mx.array, rotary: Rotary | None
) -> mx.array:
    """Undo :func:`split_pairs`."""
    if rotary is not None and rotary.traditional:
        joined = [mx.stack([first, second], axis=-1).flatten(-2)]
    else:
        joined = [first, second]
    return mx.concatenate([*joined, rest], axis=-1)


def complex_pairs(x: mx.array, rotary: Rotary) -> tuple[mx.array, mx.array]:
    """The pairs as complex numbers, ``(..., P)`` complex64, and the rest ``(..., Q)`` float32."""
    turned, rest = x[..., : rotary.dims], x[..., rotary.dims :]
    if not rotary.traditional:
        halves = turned.reshape(*x.shape[:-1], 2, rotary.dims // 2)
        turned = mx.contiguous(halves.swapaxes(-1, -2)).flatten(-2)
    return turned.view(mx.complex64), rest


def turn_pairs(x: mx.array, rotary: Rotary, real: mx.array, imaginary: mx.array) -> mx.array:
    """Multiply each pair, read as a complex number, by ``real + i imaginary``.

    Args:
        x: ``(..., T or 1, D)``.
        rotary: Says which channels form a pair.
        real: ``(P,)``, or ``(T, P)`` for a factor of its own at every row.
        imaginary: The same shape.
    """
    first, second, rest = split_pairs(x, rotary)
    turned = first * real - second * imaginary
    rest = mx.broadcast_to(rest, (*turned.shape[:-1], rest.shape[-1]))
    return join_pairs(turned, first * imaginary + second * real, rest, rotary)
