"""Nearest entries and table look-ups: what all vector quantisers share.

A table ``(B, H, C, M, K)`` holds for each of a vector's ``C`` codes and each of ``M`` queries the
scores of all ``K`` entries. The score of a token is the sum of ``C`` look-ups, which replaces a
product over ``D`` channels (Jegou, Douze and Schmid, 2011, section III).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from kvcompress.stages.affine_words import on_cpu
from kvcompress.stages.base import Quantiser

# Of distances at a time: on a CPU little more than a cache, of which MLX keeps up to ten in flight;
# on a GPU enough to fill it.
_CHUNK_BYTES = 2 << 20
_GPU_CHUNK_BYTES = 32 << 20
_LAUNCHES = 30_000  # look-ups a head in the time that a band's few operations take to start
_GROUP = 32  # tokens of one matrix product, a power of two


class TableQuantiser(Quantiser, Protocol):
    """A quantiser that decodes to a sum of entries, one a code."""

    @property
    def sub_dim(self) -> int:
        """Channels that a code speaks of."""
        ...

    def tables(self, q: mx.array) -> mx.array:
        """Scores of queries against every entry: ``(B, H, codes, M, 2**bits)`` float32."""
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


def gather(tables: mx.array, codes: mx.array) -> mx.array:
    """What codes name in their tables.

    Args:
        tables: ``(B or 1, H or 1, C or 1, M, K)``.
        codes: ``(B, H, T, C)`` unsigned.

    Returns:
        ``(B, H, C, M, T)``: laid out along the tokens, where one look-up costs a nanosecond;
        looking up rows costs ten times as much.
    """
    index = mx.contiguous(codes.swapaxes(-1, -2))[:, :, :, None, :]
    return mx.take_along_axis(tables, index, axis=-1)


def table_scores(tables: mx.array, codes: mx.array) -> mx.array:
    """Sums of look-ups: ``(B, H, C, M, K)`` and ``(B, H, T, C)`` to scores ``(B, H, M, T)``."""
    return gather(tables, codes).sum(axis=2)


def tables_pay(quantiser: TableQuantiser, *, rows: int, tokens: int, bands: int = 1) -> bool:
    """Whether look-ups in tables, one for each band of tokens, beat decoding them and a product.

    Measured on a CPU, in units of one look-up: an entry of a table takes 0.2 a channel, a channel
    of a product 0.4 to read and 0.09 a row. Decoding looks up every channel of every code once
    for all rows; tables look up every code once a row. One band after the other costs launches.
    """
    each = quantiser.codes * quantiser.sub_dim
    tables = rows * (quantiser.codes * tokens + bands * 0.2 * each * (1 << quantiser.bits))
    decoding = tokens * (each + quantiser.dim * (0.4 + 0.09 * rows)) + (bands - 1) * _LAUNCHES
    return tables < decoding
