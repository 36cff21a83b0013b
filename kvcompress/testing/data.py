"""Seeded tokens of a layer, ordinary and hostile, made without anybody's random state."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen

from kvcompress.layers import LayerSpec
from kvcompress.testing.oracles import hadamard, rope

HOSTILE = (
    "zeros",
    "constant",
    "one huge channel",
    "one channel alone",
    "near the largest number",
    "tiny",
    "duplicates",
    "a Hadamard row",
)
"""Kinds of token that break careless arithmetic."""

_LARGEST = {"float16": 6e4, "bfloat16": 1e30, "float32": 1e30}


@frozen(eq=False)
class Tokens:
    """Queries ``(B, Hq, T, D)``, keys ``(B, Hkv, T, D)`` and values ``(B, Hkv, T, Dv)``.

    Queries and keys are rotated to the positions from ``start`` on; all in the layer's dtype.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    start: int = 0

    def __len__(self) -> int:
        return int(self.keys.shape[2])

    @property
    def positions(self) -> range:
        """Where the tokens stand."""
        return range(self.start, self.start + len(self))

    def part(self, start: int, stop: int) -> Tokens:
        """The tokens ``start`` to ``stop``, where they stand."""
        cut = (slice(None), slice(None), slice(start, stop))
        return Tokens(self.queries[cut], self.keys[cut], self.values[cut], self.start + start)

    def rows(self, start: int, stop: int) -> Tokens:
        """The batch rows ``start`` to ``stop``."""
        cut = slice(start, stop)
        return Tokens(self.queries[cut], self.keys[cut], self.values[cut], self.start)

    def then(self, later: Tokens) -> Tokens:
        """These tokens, and ``later`` ones after them."""
        return Tokens(
            mx.concatenate([self.queries, later.queries], axis=2),
            mx.concatenate([self.keys, later.keys], axis=2),
            mx.concatenate([self.values, later.values], axis=2),
            self.start,
        )


def plain_keys(layer: LayerSpec, count: int, *, batch: int = 1, seed: int = 0) -> Any:
    """Keys before RoPE as real models have them, ``(B, Hkv, T, D)`` float64.

    A mean that carries much of the energy, the same for every seed, and channels of unlike size.
    """
    shape = np.random.default_rng(7)
    H, D = layer.kv_heads, layer.head_dim
    mean = 1.5 * shape.standard_normal((H, 1, D))
    spread = np.exp(0.5 * shape.standard_normal((H, 1, D)))
    noise = np.random.default_rng(seed).standard_normal((batch, H, count, D))
    return mean + spread * noise


def tokens(
    layer: LayerSpec, count: int, *, batch: int = 1, seed: int = 0, start: int = 0
) -> Tokens:
    """Ordinary tokens; the same arguments give the same tokens."""
    drawn = np.random.default_rng([seed, 1])
    keys = plain_keys(layer, count, batch=batch, seed=seed)
    queries = drawn.standard_normal((batch, layer.query_heads, count, layer.head_dim))
    values = drawn.standard_normal((batch, layer.kv_heads, count, layer.value_dim)) + 0.2
    return _tokens(layer, queries, keys, values, start)


def hostile_tokens(layer: LayerSpec, kind: str, count: int, *, seed: int = 0) -> Tokens:
    """Tokens of one of the kinds in :data:`HOSTILE`.

    Raises:
        ValueError: For another kind.
    """
    drawn = np.random.default_rng([seed, 2])
    queries = drawn.standard_normal((1, layer.query_heads, count, layer.head_dim))
    keys, values = (
        _hostile(drawn, kind, (1, layer.kv_heads, count, dim), layer.dtype)
        for dim in (layer.head_dim, layer.value_dim)
    )
    as_they_are = LayerSpec(
        kv_heads=layer.kv_heads,
        query_heads=layer.query_heads,
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        dtype=layer.dtype,
    )
    return _tokens(as_they_are, queries, keys, values, 0)


def _tokens(layer: LayerSpec, queries: Any, keys: Any, values: Any, start: int) -> Tokens:
    positions = range(start, start + keys.shape[2])
    arrays = (
        rope(queries, positions, layer.rotary),
        rope(keys, positions, layer.rotary),
        values,
    )
    made = [mx.array(a.astype(np.float32)).astype(layer.mx_dtype) for a in arrays]
    mx.eval(made)
    return Tokens(made[0], made[1], made[2], start)


def _hostile(drawn: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: str) -> Any:
    ordinary = drawn.standard_normal(shape)
    channel = int(drawn.integers(shape[-1]))
    if kind == "zeros":
        return np.zeros(shape)
    if kind == "constant":
        return np.full(shape, 3000.0)
    if kind == "one huge channel":
        ordinary[..., channel] = 1e-3 * _LARGEST[dtype]
        return ordinary
    if kind == "one channel alone":
        alone = np.zeros(shape)
        alone[..., channel] = 1.0
        return alone
    if kind == "near the largest number":
        return _LARGEST[dtype] * np.sign(ordinary)
    if kind == "tiny":
        return 1e-6 * ordinary
    if kind == "duplicates":
        return np.broadcast_to(ordinary[:, :, :1], shape).copy()
    if kind == "a Hadamard row":
        power = 1 << (shape[-1].bit_length() - 1)
        row = np.zeros(shape[-1])
        row[:power] = hadamard(power)[channel % power]
        return np.broadcast_to(row, shape).copy()
    raise ValueError(f"kind must be one of {', '.join(HOSTILE)} (got {kind!r})")
