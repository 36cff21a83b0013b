"""Seeded random numbers by hashing, the same bytes on every machine and in every version.

A library's generator may change its stream between versions; a rotation that changed would make
saved codes unreadable. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, SplitMix64's increment


def hashed(count: int, *key: int | str) -> np.ndarray:
    """``count`` independent uniform uint64, a function of ``key`` alone."""
    text = ":".join(str(part) for part in key).encode()
    start = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


def signs(count: int, *key: int | str) -> np.ndarray:
    """``count`` random signs, float32 -1 or 1."""
    return np.where(hashed(count, *key) >> np.uint64(63), -1.0, 1.0).astype(np.float32)


def noise(shape: tuple[int, ...], *key: int | str) -> np.ndarray:
    """Random numbers, uniform with mean 0 and variance 1, float32 of ``shape``."""
    high = (hashed(math.prod(shape), *key) >> np.uint64(40)).astype(np.float64)
    return ((high * 2.0**-24 - 0.5) * math.sqrt(12)).astype(np.float32).reshape(shape)
