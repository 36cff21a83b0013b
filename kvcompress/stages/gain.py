"""The gain of a row: its size, kept in 16 bits beside the codes of its direction.

A gain is stored as the upper 16 of the 31 bits that a float32 has below its sign: the whole
exponent and 8 bits of the mantissa. Unlike float16 it neither overflows nor underflows, it is
twice as precise as bfloat16, and a shift decodes it.

Forms of the gain, with ``u`` the row divided by its root mean square ``g`` and ``v`` what its
codes decode to (as in DRIVE, arXiv 2105.08339, no form costs more bits than another):

- ``raw``: ``g``;
- ``matched``: ``g |u| / |v|``, so that the decoded row has the length of the row;
- ``unbiased``: ``g |u|^2 / <u, v>``, so that a score's expectation is the score;
- ``least-squares``: ``g <u, v> / |v|^2``, the least error for this row.
"""

from __future__ import annotations

from typing import Literal, get_args

import mlx.core as mx

GainForm = Literal["raw", "matched", "unbiased", "least-squares"]
GAIN_FORMS: tuple[str, ...] = get_args(GainForm)

_DROPPED = 15  # bits of a float32's mantissa that are not kept
_LARGEST = 0xFEFF  # the code of the largest finite gain
_LEAST_OVERLAP = 0.25  # of <u, v> to |u|^2, below which an unbiased gain would explode


def row_gain(z: mx.array) -> tuple[mx.array, mx.array]:
    """Split rows into size and direction.

    Args:
        z: ``(..., D)`` float32, finite.

    Returns:
        The root mean square ``g`` of each row, ``(..., 1)``, and the rows of root mean square 1,
        ``(..., D)``. Rows of up to 1e38 do not overflow; a row of zeros has gain 0 and stays 0.
    """
    largest = mx.abs(z).max(axis=-1, keepdims=True)
    scaled = z / mx.where(largest > 0, largest, 1.0)
    rms = mx.sqrt(scaled.square().mean(axis=-1, keepdims=True))
    return largest * rms, scaled / mx.where(rms > 0, rms, 1.0)


def corrected(gain: mx.array, unit: mx.array, decoded: mx.array, form: GainForm) -> mx.array:
    """The gain that makes the decoded row fit the row in the sense of ``form``.

    Args:
        gain: ``(..., 1)`` root mean squares, ``g``.
        unit: ``(..., D)`` rows of root mean square 1, ``u``.
        decoded: ``(..., D)`` what the codes of ``unit`` decode to, ``v``.
        form: See the module.

    Returns:
        ``(..., 1)`` float32.
    """
    if form == "raw":
        return gain
    energy = decoded.square().mean(axis=-1, keepdims=True)
    energy = mx.where(energy > 0, energy, 1.0)
    if form == "matched":
        return gain / mx.sqrt(energy)
    overlap = (unit * decoded).mean(axis=-1, keepdims=True)
    if form == "least-squares":
        return gain * mx.maximum(overlap, 0.0) / energy
    safe = overlap > _LEAST_OVERLAP
    return mx.where(safe, gain / mx.where(safe, overlap, 1.0), gain / mx.sqrt(energy))


def encode_gain(gain: mx.array) -> mx.array:
    """Non-negative float32 to uint16, to the nearest; what is too large takes the largest."""
    rounded = gain.view(mx.uint32) + (1 << (_DROPPED - 1))
    return mx.minimum(rounded >> _DROPPED, _LARGEST).astype(mx.uint16)


def decode_gain(code: mx.array) -> mx.array:
    """uint16 to float32, within a factor of ``1 +- 2**-9`` of what was encoded."""
    return (code.astype(mx.uint32) << _DROPPED).view(mx.float32)
