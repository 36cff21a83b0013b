"""What a method is told of the attention layer whose cache it compresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.errors import ConfigError

Positions = range | Sequence[int] | mx.array


def _frequencies(value: object) -> tuple[float, ...] | None:
    if value is None:
        return None
    return tuple(float(f) for f in np.asarray(value, dtype=np.float32).reshape(-1))


@frozen
class Rotary:
    """The rotation that a layer's keys and queries bear, as ``mx.fast.rope`` was called.

    Attributes:
        dims: Rotated channels, counted from the first; the rest of the head passes unchanged.
        traditional: Whether channels ``2l, 2l + 1`` form a pair, instead of ``l, l + dims/2``.
        base: Base of the angles; ``None`` where ``freqs`` gives them.
        scale: Factor on the positions.
        freqs: The wave lengths ``dims / 2`` that stand in place of ``base ** (2 l / dims)``;
            an infinite one leaves its pair unrotated.
    """

    dims: int
    traditional: bool = False
    base: float | None = 10000.0
    scale: float = 1.0
    freqs: tuple[float, ...] | None = field(default=None, converter=_frequencies)

    def __attrs_post_init__(self) -> None:
        if self.dims < 2 or self.dims % 2:
            raise ConfigError(f"Rotary: dims must be even and at least 2 (got {self.dims})")
        if (self.base is None) == (self.freqs is None):
            raise ConfigError("Rotary: exactly one of base and freqs must be given")
        if self.freqs is not None and len(self.freqs) != self.dims // 2:
            raise ConfigError(
                f"Rotary: freqs must have dims / 2 = {self.dims // 2} entries "
                f"(got {len(self.freqs)})"
            )

    @property
    def angles(self) -> np.ndarray:
        """Radians per position of each pair, ``(dims / 2,)`` float64."""
        if self.freqs is not None:
            return self.scale / np.asarray(self.freqs, dtype=np.float64)
        pairs = np.arange(self.dims // 2, dtype=np.float64)
        return self.scale * np.power(float(self.base or 1.0), -2.0 * pairs / self.dims)

    def rotate(self, x: mx.array, positions: Positions) -> mx.array:
        """Rotate rows to their positions: pre-RoPE to post-RoPE.

        Args:
            x: ``(B, H, T, D)``, any float dtype.
            positions: The ``T`` positions; a ``range`` of step 1 costs least.

        Returns:
            An array of ``x``'s shape and dtype.
        """
        return self._turn(x, positions, self.scale)

    def unrotate(self, x: mx.array, positions: Positions) -> mx.array:
        """Undo :meth:`rotate`; exact to a unit in the last place of the dtype."""
        return self._turn(x, positions, -self.scale)

    def _turn(self, x: mx.array, positions: Positions, scale: float) -> mx.array:
        freqs = None if self.freqs is None else _frequency_array(self.freqs)
        base = None if self.base is None else float(self.base)

        def rope(rows: mx.array, offset: int | mx.array) -> mx.array:
            return mx.fast.rope(
                rows,
                self.dims,
                traditional=self.traditional,
                base=base,
                scale=scale,
                offset=offset,
                freqs=freqs,
            )

        if isinstance(positions, range) and positions.step == 1:
            return rope(x, positions.start)
        # MLX takes one offset a batch row, so scattered tokens move to the batch axis.
        offsets = mx.array(np.asarray(positions, dtype=np.int32))
        B, H, T, D = x.shape
        rows = x.transpose(2, 0, 1, 3).reshape(T, B * H, 1, D)
        return rope(rows, offsets).reshape(T, B, H, D).transpose(1, 2, 0, 3)


@lru_cache(maxsize=64)
def _frequency_array(freqs: tuple[float, ...]) -> mx.array:
    array = mx.array(freqs, dtype=mx.float32)
    mx.eval(array)  # a lazy table could not be evaluated by another thread
    return array


@frozen
class LayerSpec:
    """Sizes and rotation of one attention layer, immutable and hashable.

    Attributes:
        index: Place of the layer's cache in the list of caches; no two layers have the same, so
            further ones that keep their caches in one place are counted on from the list's end.
        kv_heads: Number of key-value heads, ``Hkv``.
        query_heads: Number of query heads, ``Hq``, a multiple of ``kv_heads``.
        head_dim: Channels of a key, ``D``.
        value_dim: Channels of a value; ``head_dim`` unless given.
        dtype: Name of the dtype in which the model hands over keys and values.
        rotary: The rotation of the keys; ``None`` where they bear none, or one that is not
            known exactly, so that only post-RoPE codes are possible.
        rotary_known: Whether ``rotary is None`` means "no rotation" for certain.
    """

    index: int = 0
    kv_heads: int = 1
    query_heads: int = 1
    head_dim: int = 64
    value_dim: int = 0
    dtype: str = "float16"
    rotary: Rotary | None = None
    rotary_known: bool = True

    def __attrs_post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("kv_heads", "query_heads", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"LayerSpec: {name} must be positive (got {getattr(self, name)})")
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"LayerSpec: query_heads must be a multiple of kv_heads={self.kv_heads} "
                f"(got {self.query_heads})"
            )
        if self.dtype not in ("float16", "bfloat16", "float32"):
            raise ConfigError(
                f"LayerSpec: dtype must be float16, bfloat16 or float32 (got {self.dtype!r})"
            )
        if self.rotary is not None and self.rotary.dims > self.head_dim:
            raise ConfigError(
                f"LayerSpec: rotary dims {self.rotary.dims} exceed head_dim {self.head_dim}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head, ``G``."""
        return self.query_heads // self.kv_heads

    @property
    def mx_dtype(self) -> mx.Dtype:
        """The dtype as MLX's object (kept as a name here: an ``mx.Dtype`` cannot be copied)."""
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return dtype
