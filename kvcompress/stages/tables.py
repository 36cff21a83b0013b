"""Nearest entries and table look-ups: what all vector quantisers share.

A table ``(B, H, C, M, K)`` holds for each of a vector's ``C`` codes and each of ``M`` queries the
scores of all ``K`` entries. The score of a token is the sum of ``C`` look-ups, which replaces a
product over ``D`` channels (Jegou, Douze and Schmid, 2011, section III).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Protocol

import mlx.core as mx

from kvcompress.stages.base import Quantiser
from kvcompress.stages.device import on_cpu

# Of distances at a time: on a CPU little more than a cache, of which MLX keeps up to ten in flight;
# on a GPU enough to fill it.
_CHUNK_BYTES = 2 << 20
_GPU_CHUNK_BYTES = 32 << 20
_LAUNCHES = 60_000  # nanoseconds until a band's few operations have started
_GROUP = 32  # tokens of one matrix product, a power of two


class TableQuantiser(Quantiser, Protocol):
    """A quantiser that decodes to a sum of entries, one a code."""

    @property
    def sub_dim(self) -> int:
        """Channels that a code speaks of."""
        ...

    def tables(self, q: mx.array) -> mx.array:
        """Scores of queries against every entry: ``(B, H, codes, M, 2**bits)``.

        Queries ``(B, H, M, dim)`` are float32, or complex64 for two in one.
        """
        ...

    def dots(self, q: mx.array, codes: mx.array) -> mx.array:
        """``q @ decode(codes)^T``: ``(B, H, M, dim)`` float32 to ``(B, H, M, T)``."""
        ...

    def sums(self, weights: mx.array, codes: mx.array) -> mx.array:
        """``p @ decode(codes)``: ``(B, H, M, T)`` float32 to ``(B, H, M, dim)``."""
        ...


def chunked(encode: Callable[[mx.array], mx.array], u: mx.array, distances: int) -> mx.array:
    """Encode tokens in groups of one size, and not too many groups at a time.

    Distances then take little memory. And matrix products over a group have one shape, however
    many tokens come together: the round-off of a product depends on its shape, and so would codes.

    Args:
        encode: ``(B, H, groups, t, D)`` to ``(B, H, groups, t, C)``, each group by itself.
        u: ``(B, H, T, D)`` float32.
        distances: Float32 numbers that a token of one sequence takes.

    Returns:
        ``(B, H, T, C)``.
    """
    B, H, T, D = u.shape
    tokens = max(2, (_CHUNK_BYTES if on_cpu() else _GPU_CHUNK_BYTES) // (4 * distances))
    size = min(_GROUP, 1 << tokens.bit_length() - 1)
    groups = mx.pad(u, [(0, 0), (0, 0), (0, -T % size), (0, 0)]).reshape(B, H, -1, size, D)
    step = tokens // size
    parts: list[mx.array] = []
    for start in range(0, groups.shape[2], step):
        few = groups[:, :, start : start + step]
        if parts:
            few = mx.depends([few], parts[-1:])[0]  # left lazy, all would be held at once
        parts.append(encode(few))
    whole = mx.concatenate(parts, axis=2) if parts else encode(groups)
    return whole.flatten(2, 3)[:, :, :T]


def nearest(distances: mx.array) -> mx.array:
    """The place of the least along the last axis, ties to the lower: uint8, or uint16 above 256."""
    dtype = mx.uint8 if distances.shape[-1] <= 256 else mx.uint16
    return mx.argmin(distances, axis=-1).astype(dtype)


def gather(tables: mx.array, codes: mx.array, starts: mx.array | None = None) -> mx.array:
    """What codes name in their tables.

    Args:
        tables: ``(B or 1, H or 1, C or 1, M, K)``.
        codes: ``(B, H, T, C)`` unsigned.
        starts: ``(T,)`` unsigned, where each token's part of the tables begins.

    Returns:
        ``(B, H, C, M, T)``: laid out along the tokens, where one look-up costs a nanosecond;
        looking up rows costs ten times as much.
    """
    index = mx.contiguous(codes.swapaxes(-1, -2))
    if starts is not None:
        index = index + starts
    return mx.take_along_axis(tables, index[:, :, :, None, :], axis=-1)


def in_pairs(rows: mx.array) -> mx.array:
    """Neighbouring rows as one of complex numbers: ``(..., M, D)`` to ``(..., ceil(M / 2), D)``.

    Float32 to complex64; an odd row is paired with zeros. A look-up of eight bytes costs no more
    than one of four.
    """
    if rows.shape[-2] % 2:
        rows = mx.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, 1), (0, 0)])
    return mx.contiguous(rows.swapaxes(-1, -2)).view(mx.complex64).swapaxes(-1, -2)


def table_scores(
    quantiser: TableQuantiser, q: mx.array, codes: mx.array, band: mx.array | None = None
) -> mx.array:
    """``q . decode(codes)`` as sums of look-ups in tables of each query's scores.

    Args:
        quantiser: Builds the tables.
        q: ``(B, H, n, M, D)`` float32, the queries of each of ``n`` bands.
        codes: ``(B, H, T, C)`` unsigned.
        band: ``(T,)`` unsigned, each token's band; ``None`` where there is one.

    Returns:
        ``(B, H, M, T)``.
    """
    B, H, n, M, _ = q.shape
    paired = M > 1 and on_cpu()
    rows = (in_pairs(q) if paired else q).swapaxes(2, 3)
    tables = quantiser.tables(rows.flatten(2, 3))
    entries = n << quantiser.bits
    index = mx.uint16 if entries <= 1 << 16 else mx.uint32
    starts = None if band is None else band.astype(index) << quantiser.bits
    found = gather(tables.reshape(B, H, -1, rows.shape[2], entries), codes, starts)
    if not paired:
        return found.sum(axis=2)
    sums = found.view(mx.float32).sum(axis=2).reshape(B, H, rows.shape[2], -1, 2)
    return sums.swapaxes(-1, -2).flatten(2, 3)[:, :, :M]


def tables_pay(
    quantiser: TableQuantiser, *, rows: int, tokens: int, heads: int = 1, bands: int = 1
) -> bool:
    """Whether look-ups in tables, one for each band of tokens, beat decoding them and a product.

    Measured on a CPU, in nanoseconds a head. Tables look every code up once for two rows, and add
    the numbers that they find; decoding looks every channel of every code up, two at a time, once
    for all rows. One band after the other costs launches.
    """
    each = quantiser.codes * quantiser.sub_dim
    numbers = quantiser.codes * rows
    found = tokens * (1.6 * quantiser.codes * ceil(rows / 2) + 0.54 * numbers)
    tables = found + bands * (numbers << quantiser.bits) * (0.5 + 0.08 * quantiser.sub_dim)
    product = quantiser.dim * (0.25 + 0.05 * rows)
    return tables < tokens * (0.8 * each + product) + (bands - 1) * _LAUNCHES / heads
