"""The turboquant codec against a plain NumPy version of the paper's algorithm, in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import kvcompress as kv
from kvcompress.fit.lloyd_max import lloyd_max, uniform
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages.transform import RandomisedHadamard


def rotation_of(dim: int) -> np.ndarray:
    """The codec's rotation as a matrix."""
    eye = mx.eye(dim)[None, None]
    return np.array(RandomisedHadamard(dim, 0).forward(eye), dtype=np.float64)[0, 0]


def roped(x: np.ndarray, start: int, base: float, sign: float = 1.0) -> np.ndarray:
    """Rotate the pairs ``l, l + D/2`` of ``(H, T, D)``."""
    half = x.shape[-1] // 2
    angle = sign * np.outer(np.arange(start, start + x.shape[1]), base ** (-np.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, a * s + b * c], axis=-1)


def turboquant(rows: np.ndarray, bits: int, levels: str, gain: str) -> np.ndarray:
    """Rotate, divide by the norm, take the nearest level, correct the norm, rotate back."""
    dim = rows.shape[-1]
    rotation = rotation_of(dim)
    book = (lloyd_max if levels == "lloyd-max" else uniform)(dim, bits).levels
    z = rows @ rotation
    n = np.linalg.norm(z, axis=-1, keepdims=True)
    u = z / n * np.sqrt(dim)
    v = book[np.abs(u[..., None] - book).argmin(-1)]
    overlap, energy = (u * v).sum(-1, keepdims=True) / dim, (v * v).sum(-1, keepdims=True) / dim
    factor = {
        "raw": np.ones_like(n),
        "matched": energy**-0.5,
        "unbiased": 1 / overlap,
        "least-squares": overlap / energy,
    }[gain]
    return (n / np.sqrt(dim) * factor * v) @ rotation.T


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("bits", "levels", "gain"),
    [(1, "lloyd-max", "matched"), (2, "uniform", "unbiased"), (3, "lloyd-max", "raw"),
     (4, "uniform", "matched")],
)  # fmt: skip
def test_the_codec_computes_the_algorithm(dim: int, bits: int, levels: str, gain: str) -> None:
    H, T, base = 2, 300, 1e4
    layer = LayerSpec(
        kv_heads=H, query_heads=H, head_dim=dim, dtype="float32", rotary=Rotary(dim, base=base)
    )
    chance = np.random.default_rng(bits)
    offset = 3 * chance.standard_normal((H, 1, dim))
    keys = roped(chance.standard_normal((H, T, dim)) + offset, 0, base)
    values = chance.standard_normal((H, T, dim)) + offset / 3

    method = kv.get_method("turboquant", bits=bits, levels=levels, gain=gain)
    codec = method.bind(layer)
    arrays = (mx.array(x[None].astype(np.float32)) for x in (keys, values))
    codes = codec.encode(*arrays, range(T))
    got_keys, got_values = (np.array(x)[0] for x in codec.decode(codes, range(T)))

    first = codec.warmup
    key_mean = roped(keys, 0, base, -1.0)[:, :first].mean(1, keepdims=True)
    key_mean = roped(np.broadcast_to(key_mean, keys.shape), 0, base)
    value_mean = values[:, :first].mean(1, keepdims=True)
    expected_keys = turboquant(keys - key_mean, bits, levels, gain) + key_mean
    expected_values = turboquant(values - value_mean, bits, levels, "least-squares") + value_mean

    for got, expected, mean in (
        (got_keys, expected_keys, key_mean),
        (got_values, expected_values, value_mean),
    ):
        size = np.linalg.norm(expected - mean, axis=-1)
        error = np.linalg.norm(got - expected, axis=-1) / size
        # An entry within round-off of a threshold may fall on its other side: rare.
        assert np.mean(error > 0.004) < 0.02
        assert np.median(error) < 0.003
