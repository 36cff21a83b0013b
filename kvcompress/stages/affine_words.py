"""Attention on packed codes that stand for ``scale * code + bias``.

On a GPU ``mx.quantized_matmul`` reads the words as they are. On a CPU codes are widened to float32
for ordinary products, which a fast BLAS does 2 to 16 times as fast as the kernel; and they stay in
the order in which bytes hold them, for a sum over channels does not mind.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import mlx.core as mx
import numpy as np
from attrs import define

from kvcompress.stages import products
from kvcompress.stages.device import on_cpu
from kvcompress.stages.pack import byte_planes, unpack
from kvcompress.stages.shared import shared_table

KERNEL_BITS = (2, 3, 4, 5, 6, 8)
KERNEL_GROUPS = (128, 64, 32)


@define(frozen=True, slots=False)
class AffineWords:
    """Rows of codes with a scale and a bias for each of ``groups`` equal parts of a row.

    Attributes:
        dim: Channels of a row.
        bits: Bits a code, 1 to 8.
        groups: Parts of a row, each with its own scale and bias.
    """

    dim: int
    bits: int
    groups: int = 1

    @cached_property
    def kernel_group(self) -> int:
        """Channels a scale in MLX's kernels: the most that they take; 0 where none fits."""
        size = self.dim // self.groups
        fits = [group for group in KERNEL_GROUPS if size % group == 0]
        return fits[0] if fits and self.bits in KERNEL_BITS else 0

    def decode(self, words: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """``scale * code + bias``.

        Args:
            words: ``(B, H, T, words)`` uint32.
            scales: ``(B, H, T, groups)`` of a float dtype.
            biases: The same shape and dtype.

        Returns:
            ``(B, H, T, dim)`` float32.
        """
        codes = self._codes(words)
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        if self.groups == 1:
            return codes * scales + biases
        parts = codes.reshape(*codes.shape[:-1], self.groups, -1)
        return (parts * scales[..., None] + biases[..., None]).flatten(-2)

    def scores(self, q: mx.array, words: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """``(B, H, M, dim)`` float32 queries against the rows: ``(B, H, M, T)``."""
        if self._reads_words:
            return self._kernel(q, words, scales, biases, transpose=True)
        if not self.widens(q):
            return products.dots(q, self.decode(words, scales, biases))
        totals = q.sum(axis=-1, keepdims=True)
        return self.products(q, words) * scales.swapaxes(-1, -2) + totals * biases.swapaxes(-1, -2)

    def mix(
        self, weights: mx.array, words: mx.array, scales: mx.array, biases: mx.array
    ) -> mx.array:
        """``(B, H, M, T)`` float32 weights over the rows: ``(B, H, M, dim)``."""
        if self._reads_words:
            return self._kernel(weights, words, scales, biases, transpose=False)
        if not self.widens(weights):
            return products.sums(weights, self.decode(words, scales, biases))
        sums = self.sums(weights * scales.swapaxes(-1, -2), words)
        return sums + weights @ biases.astype(mx.float32)

    def products(self, q: mx.array, words: mx.array, step: float = 1.0) -> mx.array:
        """Queries against ``step`` times the codes: ``(B, H, M, dim)`` to ``(B, H, M, T)``."""
        planes = self._planes(words)
        run = len(planes)
        q = q * _units(self.dim, self.bits, run, step)
        out = q[..., ::run] @ planes[0].swapaxes(-1, -2)
        for place, plane in enumerate(planes[1:], 1):
            out = mx.addmm(out, q[..., place::run], plane.swapaxes(-1, -2))
        return out

    def sums(self, weights: mx.array, words: mx.array, step: float = 1.0) -> mx.array:
        """Weighted sums of ``step`` times the codes: ``(B, H, M, T)`` to ``(B, H, M, dim)``."""
        parts = [products.sums(weights, plane) for plane in self._planes(words)]
        whole = parts[0] if len(parts) == 1 else mx.stack(parts, axis=-1).flatten(-2)
        return whole * _units(self.dim, self.bits, len(parts), step)

    def _planes(self, words: mx.array) -> list[mx.array]:
        return [plane.astype(mx.float32) for plane in byte_planes(words, self.bits, self.dim)]

    def widens(self, rows: mx.array) -> bool:
        """Whether to scale what rows make of the codes: where they are few it is less."""
        return not self._reads_words and self.groups == 1 and rows.shape[2] <= self.dim

    @property
    def _reads_words(self) -> bool:
        return self.kernel_group > 0 and not on_cpu()

    def _codes(self, words: mx.array) -> mx.array:
        return unpack(words, self.bits, self.dim).astype(mx.float32)

    def _kernel(
        self, x: mx.array, words: mx.array, scales: mx.array, biases: mx.array, *, transpose: bool
    ) -> mx.array:
        B, H, T, width = words.shape
        # The kernels know few group sizes: a larger group is several that share a scale.
        copies = self.dim // self.groups // self.kernel_group

        def flat(array: mx.array) -> mx.array:
            array = array.astype(mx.float32).reshape(B * H, T, self.groups)
            return array if copies == 1 else mx.repeat(array, copies, axis=-1)

        out = mx.quantized_matmul(
            x.reshape(B * H, *x.shape[2:]),
            words.reshape(B * H, T, width),
            scales=flat(scales),
            biases=flat(biases),
            transpose=transpose,
            group_size=self.kernel_group,
            bits=self.bits,
        )
        return out.reshape(B, H, *out.shape[1:])


@lru_cache(maxsize=64)
def _units(dim: int, bits: int, run: int, step: float) -> mx.array:
    """What codes as they stand in a byte that holds ``run`` are to be multiplied by, ``(dim,)``."""
    places = np.arange(dim) % run
    return shared_table(step * 0.5 ** (places * bits))
