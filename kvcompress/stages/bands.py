"""Bands of distance between a query and a key, and the mean rotation over each."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from kvcompress.layers import Rotary

Band = tuple[int, int]


def bands_between(first: int, growth: float, low: int, high: int) -> tuple[Band, ...]:
    """Bands ``[start, stop)`` of distance that meet ``[low, high)``, nearest first.

    Band 0 ends at ``first``, and each further one at ``growth`` times where it begins: that depends
    on neither ``low`` nor ``high``.
    """
    out, start = [], max(1, first)
    stop = start
    if low < start:
        out.append((0, start))
    while stop < high:
        start, stop = stop, max(stop + 1, round(stop * growth))
        if stop > low:
            out.append((start, stop))
    return tuple(out)


def band_of_tokens(bands: tuple[Band, ...], place: int, positions: range) -> mx.array:
    """The place in ``bands`` of each position's distance to ``place``, ``(T,)`` uint32."""
    table = _falling(bands)
    last = bands[-1][1] - 1  # the distance of the table's first entry
    start = last - (place - positions.start)
    return table[start : start + len(positions)]


@lru_cache(maxsize=16)
def _falling(bands: tuple[Band, ...]) -> mx.array:
    """The place in ``bands`` of every distance that they hold, the furthest first."""
    lengths = [stop - start for start, stop in reversed(bands)]
    places = np.arange(len(bands) - 1, -1, -1, dtype=np.uint32)
    table = mx.array(np.repeat(places, lengths))
    mx.eval(table)
    return table


@lru_cache(maxsize=256)
def mean_rotations(rotary: Rotary, bands: tuple[Band, ...]) -> tuple[mx.array, mx.array]:
    """Real and imaginary parts of each band's mean rotation, ``(bands, dims / 2)`` float32."""
    parts = [_mean_rotation(rotary, start, stop) for start, stop in bands]
    pair = mx.stack([real for real, _ in parts]), mx.stack([imaginary for _, imaginary in parts])
    mx.eval(*pair)
    return pair


@lru_cache(maxsize=256)
def _mean_rotation(rotary: Rotary, start: int, stop: int) -> tuple[mx.array, mx.array]:
    """The mean of ``exp(i d theta_l)`` over the distances ``d``, ``(dims / 2,)`` each."""
    turns = np.arange(start, stop, dtype=np.float64)[:, None] * rotary.angles
    real, imaginary = np.cos(turns).mean(axis=0), np.sin(turns).mean(axis=0)
    return mx.array(real.astype(np.float32)), mx.array(imaginary.astype(np.float32))
