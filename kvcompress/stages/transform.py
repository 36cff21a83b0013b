"""Invertible linear maps of the channels; none changes an exact score.

A random rotation makes the coordinates of any vector nearly Gaussian and of equal variance, so
that one scalar codebook fits them all (TurboQuant, arXiv 2504.19874; QuIP#, arXiv 2402.04396).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.stages.base import Transform
from kvcompress.stages.hashing import signs
from kvcompress.stages.shared import shared_table

# Sizes at which mx.hadamard_transform is orthonormal and its own inverse. At other sizes it may
# need a transpose, be wrong, or abort the process: it must not be called there.
HADAMARD_SIZES = (2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)


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
    """A random rotation: random signs and a Hadamard transform, twice.

    Twice, because after one pass a vector with a single channel has entries of one size, which
    no codebook for Gaussian entries fits (at 2 bits an error of 0.26 where 0.17 is the bound).
    Where MLX cannot transform all channels at once, a pass transforms overlapping windows one
    after the other, each with signs of its own. No matrix product is used: its round-off would
    depend on how many tokens come together, and so would codes. Signs are made once for each size
    and seed and shared.

    Attributes:
        dim: Channels, ``D``.
        seed: Rotations of different seeds are independent.
    """

    dim: int
    seed: int = 0
    _turns: tuple[_Turn, ...] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _positive("RandomisedHadamard", self.dim)
        object.__setattr__(self, "_turns", _turns(self.dim, self.seed))

    @property
    def table_bytes(self) -> int:
        """Bytes of the signs."""
        return sum(int(turn.signs.nbytes) for turn in self._turns)

    def forward(self, x: mx.array) -> mx.array:
        """Rotate ``(B, H, T, D)`` float32."""
        for turn in self._turns:
            x = turn.transform(x * turn.signs)
        return x

    def inverse(self, z: mx.array) -> mx.array:
        """Rotate back."""
        for turn in reversed(self._turns):
            z = turn.transform(z) * turn.signs
        return z

    def query(self, q: mx.array) -> mx.array:
        """Rotate: the map is orthonormal, so queries turn as keys do."""
        return self.forward(q)


@frozen(eq=False)
class _Turn:
    """Signs ``(D,)`` for all channels, then a transform, its own inverse, of some of them."""

    signs: mx.array
    window: slice

    def transform(self, x: mx.array) -> mx.array:
        start, stop = self.window.start, self.window.stop
        if stop - start == x.shape[-1]:
            return mx.hadamard_transform(x)
        turned = mx.hadamard_transform(x[..., start:stop])
        return mx.concatenate([x[..., :start], turned, x[..., stop:]], axis=-1)


@lru_cache(maxsize=128)
def _turns(dim: int, seed: int) -> tuple[_Turn, ...]:
    windows = 2 * _windows(dim)
    made = [
        _Turn(mx.array(signs(dim, "hadamard", dim, seed, number)), window)
        for number, window in enumerate(windows)
    ]
    mx.eval([turn.signs for turn in made])
    return tuple(made)


def _windows(dim: int) -> list[slice]:
    """Windows of the largest size that MLX transforms, which together cover all channels."""
    if dim == 1:
        return []
    size = max(s for s in HADAMARD_SIZES if s <= dim)
    starts = [*range(0, dim - size, size), dim - size]
    return [slice(start, start + size) for start in starts]


def _scale_table(scale: np.ndarray | mx.array) -> mx.array:
    values = np.array(scale, dtype=np.float32)
    if values.ndim != 2 or not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(
            f"ChannelScale: scale must be a finite positive array (heads, channels) "
            f"(got shape {values.shape})"
        )
    return shared_table(values[:, None, :])


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


def _in_order(stages: Iterable[Transform]) -> tuple[Transform, ...]:
    return tuple(stages)


@frozen(eq=False)
class Chain:
    """Transforms one after the other, the first applied to the data first."""

    stages: tuple[Transform, ...] = field(converter=_in_order)

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
