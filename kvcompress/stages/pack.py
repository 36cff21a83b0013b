"""Packing of small integers into uint32 words, a contiguous little-endian stream of bits.

Value ``i`` of a row stands at bit ``i * bits`` of the row; rows are padded to whole words. For
2, 3, 4, 5, 6 and 8 bits this is the layout of ``mx.quantize``, so MLX's quantised kernels read
the words as they are.

Codes move a run at a time. A run is an unsigned integer that holds one code a lane, and the
lanes, one byte wide or two, are squeezed together or spread apart in at most three shifts.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from kvcompress.errors import ConfigError

_WORD_BYTES = 4
_BYTE_LANES = {2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by the number of lanes
_WIDE_RUN = 4  # lanes of two bytes in a uint64


def words(count: int, bits: int) -> int:
    """Words that ``count`` codes of ``bits`` bits take."""
    return -(-count * bits // (8 * _WORD_BYTES))


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes along the last axis.

    Args:
        codes: ``(..., n)`` of an unsigned dtype, each below ``2**bits``.
        bits: From 1 to 12.

    Returns:
        ``(..., ceil(n * bits / 32))`` uint32.

    Raises:
        ConfigError: Where ``bits`` is not from 1 to 12.
    """
    _check(bits)
    if bits == 8:
        stream = codes.astype(mx.uint8)
    elif bits < 8:
        stream = _pack_bytes(codes.astype(mx.uint8), bits)
    else:
        stream = _pack_pairs(codes.astype(mx.uint16), bits)
    size = words(codes.shape[-1], bits) * _WORD_BYTES
    return _resize(stream, size).view(mx.uint32)


def unpack(packed: mx.array, bits: int, count: int) -> mx.array:
    """Undo :func:`pack`.

    Args:
        packed: ``(..., ceil(count * bits / 32))`` uint32.
        bits: From 1 to 12.
        count: Codes a row.

    Returns:
        ``(..., count)`` uint8, or uint16 above 8 bits.

    Raises:
        ConfigError: Where ``bits`` is not from 1 to 12, or the row has another length.
    """
    _check(bits)
    if packed.shape[-1] != words(count, bits):
        raise ConfigError(
            f"unpack: {count} codes of {bits} bits take {words(count, bits)} words a row "
            f"(got {packed.shape[-1]})"
        )
    codes = packed.view(mx.uint8)
    if bits < 8:
        codes = _unpack_bytes(codes, bits, count)
    elif bits > 8:
        codes = _unpack_pairs(codes, bits, count)
    return codes[..., :count]


def byte_planes(packed: mx.array, bits: int, count: int) -> list[mx.array]:
    """The codes of :func:`pack` by their place in a byte, each where it stands.

    Bringing them into their order, or down to the lowest bits, would cost more than to mask them.

    Args:
        packed: As for :func:`unpack`.
        bits: As for :func:`unpack`.
        count: As for :func:`unpack`.

    Returns:
        Of ``r`` arrays the one at ``i`` holds the codes ``i``, ``i + r``, ... of each row, times
        ``2**(i * bits)``: ``(..., count / r)`` uint8. One, in order, where codes do not fill bytes
        evenly.

    Raises:
        ConfigError: As :func:`unpack`.
    """
    _check(bits)
    run = 8 // bits
    if 8 % bits or count % run or packed.shape[-1] != words(count, bits):
        return [unpack(packed, bits, count)]
    if run == 1:
        return [packed.view(mx.uint8)[..., :count]]
    masks = [_mask(bits, 8, 32, place * bits) for place in range(run)]
    return [(packed & mask).view(mx.uint8)[..., : count // run] for mask in masks]


def _check(bits: int) -> None:
    if not 1 <= bits <= 12:
        raise ConfigError(f"pack: bits must be from 1 to 12 (got {bits})")


def _resize(x: mx.array, size: int) -> mx.array:
    """Cut the last axis to ``size``, or pad it with zeros."""
    short = size - x.shape[-1]
    if short <= 0:
        return x[..., :size]
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])


def _run(bits: int) -> int:
    """The fewest codes, a power of two, that fill whole bytes."""
    return 8 // bits if 8 % bits == 0 else 8


def _pack_bytes(codes: mx.array, bits: int) -> mx.array:
    """Codes of 1 to 7 bits, a byte each, to their stream of bytes."""
    run = _run(bits)
    number = -(-codes.shape[-1] // run)
    lanes = _squeeze(_resize(codes, number * run).view(_BYTE_LANES[run]), bits, 8, run)
    stream = lanes.view(mx.uint8).reshape(*codes.shape[:-1], number, run)
    return stream[..., : run * bits // 8].flatten(-2)


def _unpack_bytes(stream: mx.array, bits: int, count: int) -> mx.array:
    """A stream of bytes to codes of 1 to 7 bits, a byte each."""
    run = _run(bits)
    number, taken = -(-count // run), run * bits // 8
    stream = _resize(stream, number * taken)
    if taken == 1:
        lanes = stream.astype(_BYTE_LANES[run])
    else:
        groups = stream.reshape(*stream.shape[:-1], number, taken)
        lanes = _resize(groups, run).flatten(-2).view(_BYTE_LANES[run])
    return _spread(lanes, bits, 8, run).view(mx.uint8)


def _pack_pairs(codes: mx.array, bits: int) -> mx.array:
    """Codes of 9 to 12 bits to bytes: eight codes, two runs, become ``bits`` bytes."""
    number = -(-codes.shape[-1] // (2 * _WIDE_RUN))
    lanes = _resize(codes, number * 2 * _WIDE_RUN).view(mx.uint64)
    runs = _squeeze(lanes, bits, 16, _WIDE_RUN).reshape(*codes.shape[:-1], number, 2)
    low, high, size = runs[..., 0], runs[..., 1], _WIDE_RUN * bits
    joined = mx.stack([low | (high << size), high >> (64 - size)], axis=-1)
    stream = joined.view(mx.uint8)
    return stream[..., :bits].flatten(-2)


def _unpack_pairs(stream: mx.array, bits: int, count: int) -> mx.array:
    """A stream of bytes to codes of 9 to 12 bits, two bytes each."""
    number = -(-count // (2 * _WIDE_RUN))
    groups = _resize(stream, number * bits).reshape(*stream.shape[:-1], number, bits)
    joined = _resize(groups, 16).view(mx.uint64)
    low, high, size = joined[..., 0], joined[..., 1], _WIDE_RUN * bits
    # What lies above the run's own bits goes with the first spread.
    runs = mx.stack([low, (low >> size) | (high << (64 - size))], axis=-1)
    return _spread(runs.flatten(-2), bits, 16, _WIDE_RUN).view(mx.uint16)


def _squeeze(x: mx.array, bits: int, lane: int, run: int) -> mx.array:
    """Join the codes of ``run`` lanes of ``lane`` bits, two neighbours at a time."""
    width, total = 1, run * lane
    while width < run:
        size, stride = width * bits, 2 * width * lane
        moved = x >> (lane - bits) * width
        if 2 * bits <= lane:  # a neighbour moves clear of where it was
            x = (x | moved) & _mask(2 * size, stride, total)
        else:
            x = (x & _mask(size, stride, total)) | (moved & _mask(size, stride, total, size))
        width *= 2
    return x


def _spread(x: mx.array, bits: int, lane: int, run: int) -> mx.array:
    """Undo :func:`_squeeze`."""
    width, total = run, run * lane
    while width > 1:
        width //= 2
        size, stride = width * bits, 2 * width * lane
        moved = x << (lane - bits) * width
        if 2 * bits <= lane:
            x = (x | moved) & _mask(size, stride // 2, total)
        else:
            x = (x & _mask(size, stride, total)) | (moved & _mask(size, stride, total, stride // 2))
    return x


@lru_cache(maxsize=256)
def _mask(size: int, stride: int, total: int, start: int = 0) -> mx.array:
    """``size`` bits from ``start`` on in every ``stride`` bits of ``total``."""
    value = sum(((1 << size) - 1) << place for place in range(start, total, stride))
    mask = mx.array(np.array(value, dtype=f"uint{total}"))
    mx.eval(mask)
    return mask
