"""The vecinfer codec against a plain NumPy version of the paper's algorithm, in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import kvcompress as kv
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages.transform import RandomisedHadamard
from kvcompress.testing.calibration import synthetic_calibration
from kvcompress.testing.data import tokens
from kvcompress.testing.oracles import nearest, rope

H, T = 2, 120


def product(rows: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Each sub-vector of ``(H, T, D)`` replaced by the nearest entry of its codebook."""
    size = codebook.shape[3]
    out = np.empty_like(rows)
    for h in range(rows.shape[0]):
        for m in range(rows.shape[2] // size):
            book = codebook[h % codebook.shape[0], m % codebook.shape[1]].astype(np.float64)
            piece = slice(m * size, (m + 1) * size)
            out[h, :, piece] = book[nearest(rows[h, :, piece], book)[0]]
    return out


@pytest.mark.parametrize(
    ("dim", "bits", "books", "smooth", "hadamard", "centre"),
    [
        (64, 1, "layer", True, True, "calibrated"),
        (64, 1.25, "sub-space", True, False, "none"),
        (80, 2, "head", True, True, "none"),
        (96, 1.5, "layer", False, True, "calibrated"),
    ],
)
def test_the_codec_computes_the_algorithm(
    dim: int, bits: float, books: str, smooth: bool, hadamard: bool, centre: str
) -> None:
    rotary = Rotary(dim, base=1e4)
    layer = LayerSpec(kv_heads=H, query_heads=H, head_dim=dim, dtype="float32", rotary=rotary)
    method = kv.get_method(
        "vecinfer",
        bits=bits,
        codebooks=books,
        smooth=smooth,
        hadamard=hadamard,
        centre=centre,
        seed=4,
        calibration=synthetic_calibration(),
    )
    tables = synthetic_calibration().tables(method, layer)
    moments = synthetic_calibration().moments(layer)
    came = tokens(layer, T, seed=3)
    codec = method.bind(layer)
    codes = codec.encode(came.keys, came.values, came.positions)
    got_keys, got_values = (np.array(x)[0] for x in codec.decode(codes, came.positions))

    keys, values = (np.array(x[0]).astype(np.float64) for x in (came.keys, came.values))
    key_mean, value_mean = np.zeros((H, 1, dim)), np.zeros((H, 1, dim))
    if centre == "calibrated":
        key_mean, value_mean = moments.key_mean[:, None], moments.value_mean[:, None]
    mean = rope(np.broadcast_to(key_mean, keys.shape)[None], came.positions, rotary)[0]
    scale = tables["scale"][:, None].astype(np.float64) if smooth else 1.0
    mixing = np.eye(dim)
    if hadamard:
        mixing = np.array(RandomisedHadamard(dim, 4).forward(mx.eye(dim)[None, None]))[0, 0]
    z = (keys - mean) / scale @ mixing
    expected_keys = product(z, tables["keys"]) @ mixing.T * scale + mean
    expected_values = product(values - value_mean, tables["values"]) + value_mean

    for got, expected in ((got_keys, expected_keys), (got_values, expected_values)):
        off = np.abs(got - expected).max(axis=-1)
        # Two entries may be equally near but for round-off: rare.
        assert np.mean(off > 1e-4) < 0.01
