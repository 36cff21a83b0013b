"""Additive vector quantisation whose centres commute with rotary embedding.

CommVQ (arXiv 2506.18879): read as a complex number for each pair of channels that RoPE turns, a
centre is ``z_a + i z_b``, both from one table of ``N`` vectors. Turning a decoded key is turning
the tables. Channels that do not rotate have a free part ``u_a + v_b``.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.layers import Rotary
from kvcompress.stages import products
from kvcompress.stages.device import on_cpu
from kvcompress.stages.pairs import join_pairs, split_pairs
from kvcompress.stages.product_vq import bits_of, evaluated
from kvcompress.stages.tables import chunked, nearest

_FEW_ROWS = 8


def complex_pairs(
    x: NDArray[np.floating[Any]], rotary: Rotary | None
) -> tuple[NDArray[np.complexfloating[Any, Any]], NDArray[np.floating[Any]]]:
    """Vectors ``(..., D)`` as complex pairs ``(..., P)`` and what does not rotate ``(..., Q)``."""
    first, second, rest = split_pairs(x, rotary)
    return first + 1j * second, rest


def _turning(values: np.ndarray | mx.array) -> mx.array:
    return evaluated("CommutingVQ", "turning", values, 5)


def _still(values: np.ndarray | mx.array | None) -> mx.array | None:
    return None if values is None else evaluated("CommutingVQ", "still", values, 5)


@frozen(eq=False)
class CommutingVQ:
    """Stages of ``N^2`` centres, each named by two codes: ``b``, then ``a``.

    Packed, a pair of codes is the one index ``N a + b``. Entry 0 of the tables that
    :func:`kvcompress.fit.em.fit_commuting` makes is zero, so a stage never adds to an error.

    Attributes:
        turning: ``(H, R, N, 2, P)`` real and imaginary parts, float16 or float32.
        still: ``(H, R, 2, N, Q)``, ``u`` and ``v``; ``None`` where every channel rotates.
        rotary: Says which channels form a pair; ``None`` where none rotates (``P = 0``).
    """

    turning: mx.array = field(converter=_turning)
    rotary: Rotary | None
    still: mx.array | None = field(default=None, converter=_still)
    bits: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        H, R, N, parts, pairs = self.turning.shape
        object.__setattr__(self, "bits", bits_of("CommutingVQ", N))
        if self.bits > 6:
            raise ConfigError(f"CommutingVQ: a table must have at most 64 entries (got {N})")
        dims = 0 if self.rotary is None else self.rotary.dims
        if parts != 2 or pairs != dims // 2:
            raise ConfigError(
                f"CommutingVQ: turning must have shape (H, R, N, 2, {dims // 2}) for {dims} "
                f"rotating channels (got {self.turning.shape})"
            )
        if self.still is not None and self.still.shape[:4] != (H, R, 2, N):
            raise ConfigError(
                f"CommutingVQ: still must have shape ({H}, {R}, 2, {N}, Q) (got {self.still.shape})"
            )

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        rest = 0 if self.still is None else int(self.still.shape[-1])
        return 2 * int(self.turning.shape[-1]) + rest

    @property
    def sub_dim(self) -> int:
        """Channels that a code speaks of: all."""
        return self.dim

    @property
    def stages(self) -> int:
        """Stages, ``R``."""
        return int(self.turning.shape[1])

    @property
    def codes(self) -> int:
        """Codes a vector: two a stage."""
        return 2 * self.stages

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables."""
        still = 0 if self.still is None else int(self.still.nbytes)
        return int(self.turning.nbytes) + still

    def book(self) -> mx.array:
        """What each code adds, ``(H, 2 R, N, D)`` float32 in the layer's order of channels."""
        real, imaginary = mx.split(self.turning.astype(mx.float32), 2, axis=3)
        # Of each stage what b adds, i z and v, before what a adds, z and u.
        first = mx.stack([-imaginary, real], axis=2).squeeze(4)
        second = mx.stack([real, imaginary], axis=2).squeeze(4)
        if self.still is None:
            rest = first[..., :0]
        else:
            rest = self.still.astype(mx.float32)[:, :, ::-1]
        whole = join_pairs(first, second, rest, self.rotary)
        return whole.flatten(1, 2)

    def encode(self, u: mx.array) -> mx.array:
        """The greedy codes of ``(B, H, T, D)`` float32: ``(B, H, T, 2 R)`` uint8."""
        book = self.book()
        squares = 0.5 * mx.square(book).sum(axis=-1)
        stages = []
        for place in range(0, self.codes, 2):
            turned, direct = book[:, place], book[:, place + 1]
            half = direct @ turned.swapaxes(-1, -2)
            half = half + squares[:, place + 1, :, None] + squares[:, place, None]
            stages.append((turned[:, None], direct[:, None], half[:, None]))

        def encode_few(rows: mx.array) -> mx.array:
            codes = []
            for turned, direct, half in stages:
                of_a, of_b = rows @ direct.swapaxes(-1, -2), rows @ turned.swapaxes(-1, -2)
                # The best b of every a first, as a least along an outer axis, which is fast;
                # then the b of the best a.
                each = half.swapaxes(-1, -2)[:, :, None] - of_b[..., None]
                a = nearest(each.min(axis=-2) - of_a)
                b = nearest(_rows_of(half, a) - of_b)
                rows = rows - _rows_of(turned, b) - _rows_of(direct, a)
                codes += [b, a]
            return mx.stack(codes, axis=-1)

        return chunked(encode_few, u, u.shape[1] << 2 * self.bits)

    def decode(self, codes: mx.array) -> mx.array:
        """``(B, H, T, 2 R)`` to ``(B, H, T, D)`` float32."""
        book = self.book()
        out = _rows_of(book[:, 0], codes[..., 0])
        for place in range(1, self.codes):
            out = out + _rows_of(book[:, place], codes[..., place])
        return out

    def tables(self, q: mx.array) -> mx.array:
        """Scores of queries against every entry: ``(B, H, M, D)`` to ``(B, H, 2 R, M, N)``.

        For codes that are read unrotated; rotated keys are decoded.
        """
        B, H, M, _ = q.shape
        book = self.book().flatten(1, 2).astype(q.dtype)
        return (q @ book.swapaxes(-1, -2)).reshape(B, H, M, self.codes, -1).swapaxes(2, 3)

    def dots(self, q: mx.array, codes: mx.array) -> mx.array:
        """``q @ decode(codes)^T``: ``(B, H, M, D)`` float32 to ``(B, H, M, T)``."""
        return products.dots(q, self.decode(codes))

    def sums(self, weights: mx.array, codes: mx.array) -> mx.array:
        """``p @ decode(codes)``: ``(B, H, M, T)`` float32 to ``(B, H, M, D)``.

        For few rows by the weight that each entry gets in all, which is summed over the tokens
        before any entry is read.
        """
        B, H, M, T = weights.shape
        if M > _FEW_ROWS or not on_cpu():
            return weights @ self.decode(codes)
        book = self.book().flatten(1, 2)
        entries = self.codes << self.bits
        starts = mx.arange(B * H * self.codes, dtype=mx.uint32).reshape(B, H, -1, 1) << self.bits
        places = (codes.swapaxes(-1, -2) + starts).flatten()
        rows = weights.swapaxes(-1, -2)[:, :, None]
        rows = mx.broadcast_to(rows, (B, H, self.codes, T, M)).reshape(-1, M)
        shares = mx.zeros((B * H * entries, M)).at[places].add(rows)
        return shares.reshape(B, H, entries, M).swapaxes(-1, -2) @ book


def _rows_of(table: mx.array, codes: mx.array) -> mx.array:
    """Entries of ``(H, ..., N, D)`` at codes ``(B, H, ...)``: a row in place of each code."""
    H, N, D = table.shape[0], *table.shape[-2:]
    starts = mx.arange(0, H * N, N, dtype=mx.uint32).reshape(H, *[1] * (codes.ndim - 2))
    return mx.take(table.reshape(H * N, D), codes + starts, axis=0)
