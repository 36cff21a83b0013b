"""Residual vector quantisation: stages of codebooks, each coding what the ones before it leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import mlx.core as mx
from attrs import frozen

from kvcompress.errors import ConfigError
from kvcompress.stages.product_vq import ProductVQ


@frozen(eq=False)
class ResidualVQ:
    """A vector is the sum of one entry a stage, chosen greedily.

    A stage whose codebook holds a zero vector never adds to the error; those of
    :func:`kvcompress.fit.residual.fit_residual` do.

    Attributes:
        stages: Quantisers of equal sizes, the first applied to the vector itself.
    """

    stages: tuple[ProductVQ, ...]

    def __attrs_post_init__(self) -> None:
        sizes = {(stage.dim, stage.sub_dim, stage.bits) for stage in self.stages}
        if len(sizes) != 1:
            raise ConfigError(
                f"ResidualVQ: stages must be at least one, of equal dim, sub_dim and bits "
                f"(got {sorted(sizes)})"
            )

    @classmethod
    def of(cls, codebooks: Sequence[mx.array], dim: int = 0) -> ResidualVQ:
        """From one codebook ``(H or 1, D / s or 1, 2**bits, s)`` a stage."""
        return cls(tuple(ProductVQ(codebook, dim) for codebook in codebooks))

    @property
    def bits(self) -> int:
        """Bits a code."""
        return self.stages[0].bits

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        return self.stages[0].dim

    @property
    def sub_dim(self) -> int:
        """Channels that a code speaks of."""
        return self.stages[0].sub_dim

    @property
    def codes(self) -> int:
        """Codes a vector: those of the first stage first."""
        return len(self.stages) * self.stages[0].codes

    @property
    def table_bytes(self) -> int:
        """Bytes of all codebooks."""
        return sum(stage.table_bytes for stage in self.stages)

    def encode(self, u: mx.array) -> mx.array:
        """``(B, H, T, D)`` float32 to ``(B, H, T, codes)``."""
        codes = []
        for stage in self.stages:
            codes.append(stage.encode(u))
            u = u - stage.decode(codes[-1])
        return mx.concatenate(codes, axis=-1)

    def decode(self, codes: mx.array) -> mx.array:
        """The sum of the stages' entries: ``(B, H, T, D)`` float32."""
        parts = mx.split(codes, len(self.stages), axis=-1)
        return _sum(s.decode(part) for s, part in zip(self.stages, parts, strict=True))

    def tables(self, q: mx.array) -> mx.array:
        """Scores of queries against every entry: ``(B, H, codes, M, 2**bits)``."""
        return mx.concatenate([stage.tables(q) for stage in self.stages], axis=2)

    def dots(self, q: mx.array, codes: mx.array) -> mx.array:
        """``q @ decode(codes)^T``, the sum of the stages': ``(B, H, M, D)`` to ``(B, H, M, T)``."""
        parts = mx.split(codes, len(self.stages), axis=-1)
        return _sum(s.dots(q, part) for s, part in zip(self.stages, parts, strict=True))

    def sums(self, weights: mx.array, codes: mx.array) -> mx.array:
        """``p @ decode(codes)``, the sum of the stages': ``(B, H, M, T)`` to ``(B, H, M, D)``."""
        parts = mx.split(codes, len(self.stages), axis=-1)
        return _sum(s.sums(weights, part) for s, part in zip(self.stages, parts, strict=True))


def _sum(parts: Iterable[mx.array]) -> mx.array:
    return reduce(mx.add, parts)
