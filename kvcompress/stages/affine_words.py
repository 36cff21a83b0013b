"""Attention on packed codes that stand for ``scale * code + bias``.

On a GPU ``mx.quantized_matmul`` reads the words as they are. On a CPU it sums weighted rows fast
where rows of weights are few and codes fill bytes evenly; for all else codes are widened to float32
for an ordinary product, which a fast BLAS does 2 to 16 times as fast as the kernel.
"""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
from attrs import define

from kvcompress.stages.pack import unpack

KERNEL_BITS = (2, 3, 4, 5, 6, 8)
KERNEL_GROUPS = (128, 64, 32)

# Rows of weights up to which a CPU's kernel is at least even with widening, by bits; measured.
_CPU_MIX_ROWS = {2: 1, 4: 4, 6: 4, 8: 4}


def on_cpu() -> bool:
    """Whether MLX computes on the CPU unless told otherwise."""
    return bool(mx.default_device().type == mx.cpu)


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
        if self.kernel_group and not on_cpu():
            return self._kernel(q, words, scales, biases, transpose=True)
        if self._decodes(q):
            return q @ self.decode(words, scales, biases).swapaxes(-1, -2)
        products = q @ self._codes(words).swapaxes(-1, -2)
        totals = q.sum(axis=-1, keepdims=True)
        return products * scales.swapaxes(-1, -2) + totals * biases.swapaxes(-1, -2)

    def mix(
        self, weights: mx.array, words: mx.array, scales: mx.array, biases: mx.array
    ) -> mx.array:
        """``(B, H, M, T)`` float32 weights over the rows: ``(B, H, M, dim)``."""
        few = weights.shape[2] <= _CPU_MIX_ROWS.get(self.bits, 0)
        if self.kernel_group and (few or not on_cpu()):
            return self._kernel(weights, words, scales, biases, transpose=False)
        if self._decodes(weights):
            return weights @ self.decode(words, scales, biases)
        products = (weights * scales.swapaxes(-1, -2)) @ self._codes(words)
        return products + weights @ biases.astype(mx.float32)

    def _decodes(self, rows: mx.array) -> bool:
        """Whether to scale the tokens' channels: with few rows their products are fewer."""
        return self.groups > 1 or rows.shape[2] > self.dim

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
