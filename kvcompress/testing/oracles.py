"""What the laws compare with: slow, plain NumPy in float64, written apart from the library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcompress.layers import Rotary

Array = np.ndarray[Any, np.dtype[Any]]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    mask: Array | str | None = None,
    sinks: Array | None = None,
) -> Array:
    """Softmax attention with grouped heads.

    Args:
        q: ``(B, Hq, L, D)``.
        k: ``(B, Hkv, T, D)``.
        v: ``(B, Hkv, T, Dv)``.
        scale: Factor on the scores.
        mask: ``None``, ``"causal"`` (aligned to the lower right), bool, or added to the scores.
        sinks: ``(Hq,)`` logits that take weight and give nothing.

    Returns:
        ``(B, Hq, L, Dv)`` float64.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = scale * np.einsum("bhld,bhtd->bhlt", q, k)
    L, T = scores.shape[2:]
    if isinstance(mask, str):
        scores = np.where(np.arange(T) <= np.arange(T - L, T)[:, None], scores, -np.inf)
    elif mask is not None:
        mask = np.asarray(mask)
        shown = mask.dtype == bool
        scores = np.where(mask, scores, -np.inf) if shown else scores + mask.astype(np.float64)
    extra = np.full((1, q.shape[1], 1, 1), -np.inf)
    if sinks is not None:
        extra = np.asarray(sinks, dtype=np.float64).reshape(1, -1, 1, 1)
    peak = np.maximum(scores.max(axis=-1, keepdims=True), extra)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(extra - peak)
    return np.asarray(np.einsum("bhlt,bhtd->bhld", weights / total, v))


def rope(x: Array, positions: Sequence[int], rotary: Rotary | None) -> Array:
    """Rotate rows ``(B, H, T, D)`` to their positions: pair ``l`` by ``position * angle_l``."""
    x = np.array(x, dtype=np.float64)
    if rotary is None:
        return x
    half = rotary.dims // 2
    if rotary.freqs is not None:
        lengths = np.asarray(rotary.freqs, dtype=np.float64)
    else:
        lengths = float(rotary.base or 0.0) ** (np.arange(half) * 2.0 / rotary.dims)
    turns = np.asarray(positions, dtype=np.float64)[:, None] * rotary.scale / lengths
    if rotary.traditional:
        first, second = np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)
    else:
        first, second = np.arange(half), np.arange(half, 2 * half)
    a, b = x[..., first], x[..., second]
    x[..., first] = a * np.cos(turns) - b * np.sin(turns)
    x[..., second] = a * np.sin(turns) + b * np.cos(turns)
    return x


def pack_bits(codes: Array, bits: int) -> Array:
    """Codes ``(..., n)`` as little-endian bit streams in uint32 words, rows padded with zeros."""
    planes = (np.asarray(codes, dtype=np.uint64)[..., None] >> np.arange(bits, dtype=np.uint64)) & 1
    stream = planes.reshape(*planes.shape[:-2], -1).astype(np.uint8)
    padding = -stream.shape[-1] % 32
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, padding)])
    return np.packbits(stream, axis=-1, bitorder="little").view("<u4")


def unpack_bits(words: Array, bits: int, count: int) -> Array:
    """Undo :func:`pack_bits`: the first ``count`` codes of each row."""
    raw = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    stream = np.unpackbits(raw, axis=-1, bitorder="little")[..., : count * bits]
    planes = stream.reshape(*stream.shape[:-1], count, bits).astype(np.int64)
    return np.asarray((planes << np.arange(bits)).sum(axis=-1))


def nearest(x: Array, book: Array) -> tuple[Array, Array]:
    """The nearest of ``book``'s rows to each row of ``x``, and its squared distance.

    Args:
        x: ``(n, s)``.
        book: ``(K, s)``.

    Returns:
        Indices ``(n,)``, the lowest of equals, and squared distances ``(n,)``.
    """
    gaps = ((x[:, None, :] - book[None]) ** 2).sum(axis=-1)
    best = gaps.argmin(axis=1)
    return best, gaps[np.arange(len(x)), best]


def hadamard(dim: int) -> Array:
    """Sylvester's orthonormal matrix.

    Raises:
        ValueError: ``dim`` is no power of two.
    """
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"a Sylvester matrix needs a power of two (got {dim})")
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(dim))
