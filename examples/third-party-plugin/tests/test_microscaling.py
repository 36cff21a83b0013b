"""The codec against the formats as they are published, slowly and in float64."""

# ruff: noqa: D103 (the names of tests say what they are)

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from kv_microscaling.stages import Microscaled, TinyFloats

import kvcompress as kv
from kvcompress.layers import LayerSpec
from kvcompress.testing.data import tokens

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M3 = [i / 8 for i in range(16)] + [i / 4 for i in range(8, 16)] + [i / 2 for i in range(8, 16)]
SIZES = {4: E2M1, 6: E2M3}


def published(rows: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Rows ``(..., D)`` with each group scaled into range and each channel at the nearest float."""
    floats = np.array(sorted({sign * size for size in SIZES[bits] for sign in (1, -1)}))
    out = np.empty_like(rows)
    for start in range(0, rows.shape[-1], group):
        part = rows[..., start : start + group]
        powers = 2.0 ** np.arange(-30, 30)
        in_range = np.abs(part).max(axis=-1, keepdims=True) <= floats[-1] * powers
        scale = powers[in_range.argmax(axis=-1)][..., None]
        nearest = np.abs(part[..., None] / scale[..., None] - floats).argmin(axis=-1)
        out[..., start : start + group] = floats[nearest] * scale
    return out


@pytest.mark.parametrize("bits", SIZES)
def test_the_floats_are_the_published_ones(bits: int) -> None:
    codes = mx.arange(1 << bits).astype(mx.uint8)
    sizes = np.array(SIZES[bits])
    assert np.array_equal(TinyFloats(1 << bits, bits).decode(codes), [*sizes, *-sizes])


@pytest.mark.parametrize(("dim", "bits", "group"), [(64, 4, 32), (80, 6, 32), (40, 4, 16)])
def test_the_codec_computes_the_format(dim: int, bits: int, group: int) -> None:
    layer = LayerSpec(kv_heads=2, head_dim=dim, query_heads=2, dtype="float32")
    came = tokens(layer, 100, seed=3)
    codec = kv.get_method("microscaling", bits=bits, group=group, rotate=False).bind(layer)
    decoded = codec.decode(codec.encode(came.keys, came.values, came.positions), came.positions)
    for got, given in zip(decoded, (came.keys, came.values), strict=True):
        rows = np.array(given, dtype=np.float64)
        mean = rows[:, :, :64].mean(axis=2, keepdims=True)
        off = np.abs(np.array(got) - mean - published(rows - mean, bits, group)).max(axis=-1)
        # The mean is float32 there: a channel halfway between two floats may go the other way.
        assert np.mean(off > 1e-4) < 0.01


def test_mlx_reads_four_bits_as_its_own_mxfp4() -> None:
    rows = mx.random.normal((1, 2, 50, 96), key=mx.random.key(0))
    coder = Microscaled(TinyFloats(96, 4), heads=2)
    stored = coder.encode(rows)
    theirs = mx.dequantize(stored["codes"], stored["exponents"], None, 32, 4, mode="mxfp4")
    assert mx.array_equal(coder.decode(stored), theirs.astype(mx.float32))


def test_rotating_spreads_an_outlier_over_its_group() -> None:
    layer = LayerSpec(head_dim=64, dtype="float32")
    came = tokens(layer, 100)
    keys = came.keys + 30 * came.keys * (mx.arange(64) == 5)
    kept = mx.arange(64) != 5
    error = {}
    for rotate in (False, True):
        codec = kv.get_method("microscaling", rotate=rotate).bind(layer)
        codes = codec.encode(keys, came.values, came.positions)
        off = (codec.decode(codes, came.positions)[0] - keys) * kept
        error[rotate] = mx.square(off[..., :32]).mean().item()
    assert error[True] < error[False]


def test_halves_go_to_the_even_code() -> None:
    halves = mx.array([0.25, 0.75, 1.25, 2.5, 3.5, 5.0, -0.75, -5.0])
    floats = TinyFloats(8, 4)
    decoded = np.array(floats.decode(floats.encode(halves)))
    assert decoded.tolist() == [0, 1, 1, 2, 4, 4, -1, -4]


@pytest.mark.parametrize("bits", range(3, 9))
def test_nothing_is_cut_off(bits: int) -> None:
    sizes = mx.array(np.geomspace(1e-3, 1e3, 500, dtype=np.float32)).reshape(1, 1, -1, 1)
    coder = Microscaled(TinyFloats(1, bits), heads=1)
    off = mx.abs(coder.decode(coder.encode(sizes)) - sizes) / sizes
    assert off.max().item() <= 1 / 2 ** (bits - 2) + 1e-6


def test_bits_a_channel_are_the_code_and_a_share_of_the_exponent() -> None:
    schema = kv.get_method("microscaling").bind(LayerSpec(head_dim=128)).schema
    assert 8 * schema.bytes_per_token / 256 == 4 + 8 / 32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 2}, "microscaling: bits must be an integer from 3 to 8"),
        ({"group": 48}, "microscaling: group must be one of 16, 32, 64"),
        ({"centre": "median"}, "microscaling: centre must be one of 'sequence', 'none'"),
    ],
)
def test_illegal_options_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(kv.ConfigError, match=text):
        kv.get_method("microscaling", **options)


def test_listing_imports_no_mlx() -> None:
    script = "import sys, kv_microscaling; assert not {'mlx', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
