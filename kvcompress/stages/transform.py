"""Invertible linear maps of the channels; none changes an exact score.

A random rotation makes the coordinates of any vector nearly Gaussian and of equal variance, so
that one scalar codebook fits them all (TurboQuant, arXiv 2504.19874; QuIP#, arXiv 2402.04396).
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.stages.base import Transform
from kvcompress.stages.hashing import normals, signs

# Sizes at which mx.hadamard_transform is orthonormal and its own inverse. At other sizes it may
# need a transpose, be wrong, or abort the process: it must not be called there.
HADAMARD_SIZES = frozenset({16, 32, 48, 64, 96, 128, 192, 256, 384, 512})


def _positive(name: str, dim: int) -> None:
    if dim < 1:
        raise ConfigError(f"{name}: dim must be positive (got {dim})")


@frozen
class Identity:
    """No transform."""

    dim: int
    table_bytes: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        _positive("Identity", self.dim)

    def forward(self, x: mx.array) -> mx.array:
        """``x``."""
        return x

    def inverse(self, z: mx.array) -> mx.array:
        """``z``."""
        return z

    def query(self, q: mx.array) -> mx.array:
        """``q``."""
        return q


@frozen
class RandomisedHadamard:
    """A random rotation: ``x -> H D2 H D1 x`` with random signs ``D1, D2``.

    Twice, because after one pass a vector with a single channel has entries of one size, which
    no codebook for Gaussian entries fits (at 2 bits an error of 0.26 where 0.17 is the bound).
    Sizes that MLX cannot transform use a dense random orthonormal matrix in its place. Tables are
    made once for each size and seed and shared.

    Attributes:
        dim: Channels, ``D``.
        seed: Rotations of different seeds are independent.
    """

    dim: int
    seed: int = 0
    _tables: tuple[mx.array, ...] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _positive("RandomisedHadamard", self.dim)
        make = _sign_pair if self.dim in HADAMARD_SIZES else _orthonormal
        object.__setattr__(self, "_tables", make(self.dim, self.seed))

    @property
    def table_bytes(self) -> int:
        """Bytes of the sign vectors or of the matrix."""
        return sum(int(table.nbytes) for table in self._tables)

    def forward(self, x: mx.array) -> mx.array:
        """Rotate ``(B, H, T, D)`` float32."""
        if len(self._tables) == 1:
            return x @ self._tables[0]
        first, second = self._tables
        return mx.hadamard_transform(mx.hadamard_transform(x * first) * second)

    def inverse(self, z: mx.array) -> mx.array:
        """Rotate back."""
        if len(self._tables) == 1:
            return z @ self._tables[0].T
        first, second = self._tables
        return mx.hadamard_transform(mx.hadamard_transform(z) * second) * first

    def query(self, q: mx.array) -> mx.array:
        """Rotate: the map is orthonormal, so queries turn as keys do."""
        return self.forward(q)


@lru_cache(maxsize=128)
def _sign_pair(dim: int, seed: int) -> tuple[mx.array, ...]:
    pair = (
        mx.array(signs(dim, "hadamard", dim, seed, 1)),
        mx.array(signs(dim, "hadamard", dim, seed, 2)),
    )
    mx.eval(pair)
    return pair


@lru_cache(maxsize=32)
def _orthonormal(dim: int, seed: int) -> tuple[mx.array, ...]:
    """A Haar-distributed matrix: QR of normals, the signs of the diagonal of R taken out."""
    q, r = np.linalg.qr(normals(dim * dim, "orthonormal", dim, seed).reshape(dim, dim))
    matrix = mx.array((q * np.where(np.diagonal(r) < 0, -1.0, 1.0)).astype(np.float32))
    mx.eval(matrix)
    return (matrix,)


def _scale_table(scale: np.ndarray | mx.array) -> mx.array:
    values = np.array(scale, dtype=np.float32)
    if values.ndim != 2 or not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(
            f"ChannelScale: scale must be a finite positive array (heads, channels) "
            f"(got shape {values.shape})"
        )
    table = mx.array(values[:, None, :])
    mx.eval(table)
    return table


@frozen(eq=False)
class ChannelScale:
    """``z = x / scale``, a positive factor a head and channel; queries are multiplied by it.

    Attributes:
        scale: ``(H, D)`` given, kept as ``(H, 1, D)`` float32.
    """

    scale: mx.array = field(converter=_scale_table)

    @property
    def dim(self) -> int:
        """Channels, ``D``."""
        return int(self.scale.shape[-1])

    @property
    def table_bytes(self) -> int:
        """Bytes of the factors."""
        return int(self.scale.nbytes)

    def forward(self, x: mx.array) -> mx.array:
        """``x / scale``."""
        return x / self.scale

    def inverse(self, z: mx.array) -> mx.array:
        """``z * scale``."""
        return z * self.scale

    def query(self, q: mx.array) -> mx.array:
        """``q * scale``."""
        return q * self.scale


@frozen(eq=False)
class Chain:
    """Transforms one after the other, the first applied to the data first."""

    stages: tuple[Transform, ...] = field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        dims = {stage.dim for stage in self.stages}
        if len(dims) != 1:
            raise ConfigError(
                f"Chain: stages must be at least one and of equal dim (got {sorted(dims)})"
            )

    @property
    def dim(self) -> int:
        """Channels of every stage."""
        return self.stages[0].dim

    @property
    def table_bytes(self) -> int:
        """Bytes of all stages."""
        return sum(stage.table_bytes for stage in self.stages)

    def forward(self, x: mx.array) -> mx.array:
        """All stages in order."""
        for stage in self.stages:
            x = stage.forward(x)
        return x

    def inverse(self, z: mx.array) -> mx.array:
        """The inverses in reverse order."""
        for stage in reversed(self.stages):
            z = stage.inverse(z)
        return z

    def query(self, q: mx.array) -> mx.array:
        """The stages' query maps in order."""
        for stage in self.stages:
            q = stage.query(q)
        return q
