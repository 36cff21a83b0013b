"""The commvq codec against a plain NumPy version of the paper's algorithm, in float64."""

from __future__ import annotations

import numpy as np
import pytest

import kvcompress as kv
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.testing.calibration import synthetic_calibration
from kvcompress.testing.data import tokens
from kvcompress.testing.oracles import nearest, rope

H, T, D = 2, 60, 64


def additive(rows: np.ndarray, turning: np.ndarray, still: np.ndarray, dims: int) -> np.ndarray:
    """Greedy over all 64 x 64 centres of each stage: ``(H, T, D)`` to what is decoded."""
    out = np.zeros_like(rows)
    for h in range(H):
        for parts, free in zip(turning[h], still[h], strict=True):
            z = parts[:, 0].astype(np.float64) + 1j * parts[:, 1]
            c = (z[:, None] + 1j * z[None]).reshape(64 * 64, dims // 2)
            u, v = free.astype(np.float64)
            rest = (u[:, None] + v[None]).reshape(64 * 64, D - dims)
            centres = np.concatenate([c.real, c.imag, rest], axis=1)
            for t in range(T):
                left = rows[h, t] - out[h, t]
                out[h, t] += centres[nearest(left[None], centres)[0][0]]
    return out


@pytest.mark.parametrize(
    ("bits", "dims", "centre"), [(1, 64, "calibrated"), (1, 32, "none"), (2, 64, "none")]
)
def test_the_codec_computes_the_algorithm(bits: int, dims: int, centre: str) -> None:
    rotary = Rotary(dims, base=1e4)
    layer = LayerSpec(kv_heads=H, query_heads=H, head_dim=D, dtype="float32", rotary=rotary)
    calibration = synthetic_calibration()
    method = kv.get_method("commvq", bits=bits, centre=centre, calibration=calibration)
    tables = calibration.tables(method, layer)
    came = tokens(layer, T, seed=3, start=1000)
    codec = method.bind(layer)
    codes = codec.encode(came.keys, came.values, came.positions)
    got_keys, got_values = (np.array(x)[0] for x in codec.decode(codes, came.positions))

    keys, values = (np.array(x[0]).astype(np.float64) for x in (came.keys, came.values))
    mean = calibration.moments(layer).key_mean[:, None] if centre == "calibrated" else 0.0
    plain = rope(keys[None], [-p for p in came.positions], rotary)[0] - mean
    gain = np.sqrt(np.square(plain).mean(axis=(0, 2)))[None, :, None]
    kept = additive(plain / gain, tables["turning"], tables["still"], dims)
    expected_keys = rope((gain * kept + mean)[None], came.positions, rotary)[0]
    expected_values, size = np.empty_like(values), 8 // bits
    for h in range(H):
        for m in range(D // size):
            piece = slice(m * size, (m + 1) * size)
            book = tables["values"][h, m].astype(np.float64)
            expected_values[h, :, piece] = book[nearest(values[h, :, piece], book)[0]]

    # The stored gain is rounded to one part in 512; an entry as near as another may be taken.
    for got, expected, exact in (
        (got_keys, expected_keys, 4e-3),
        (got_values, expected_values, 1e-4),
    ):
        off = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert np.mean(off > exact) < 0.1
        assert np.median(off) < exact / 2
