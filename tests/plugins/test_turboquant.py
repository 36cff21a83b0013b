from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

import kvcompress as kv
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages.gain_coder import GainCoder
from kvcompress.stages.sketch_coder import SketchCoder
from kvcompress.stages.tree_coder import TreeCoder

LAYER = LayerSpec(kv_heads=2, query_heads=4, head_dim=64, dtype="float32", rotary=Rotary(64))


@pytest.mark.parametrize("bits", [0, 9, -1, 4.0, 3.5, "4", None, True])
def test_bits_are_never_clamped(bits: object) -> None:
    with pytest.raises(kv.ConfigError, match="turboquant: bits must be an integer from 1 to 8"):
        kv.get_method("turboquant", bits=bits)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"variant": "prod", "bits": 1}, r"bits must be at least 2 for variant='prod' \(got 1\)"),
        ({"variant": "prod", "key_bits": 1}, r"key_bits must be at least 2 for variant='prod'"),
        ({"variant": "rvq", "bits": 1}, r"bits must be at least 2 for variant='rvq'"),
        ({"variant": "rvq", "value_bits": 1}, r"value_bits must be at least 2 for variant='rvq'"),
        ({"variant": "rvq", "levels": "uniform"}, r"levels must be 'lloyd-max' .*variant='rvq'"),
        ({"variant": "prod", "gain": "raw"}, r"gain must be None for variant='prod' \(got 'raw'\)"),
    ],
)
def test_options_that_exclude_each_other_are_both_named(
    options: dict[str, object], text: str
) -> None:
    with pytest.raises(kv.ConfigError, match=text):
        kv.get_method("turboquant", **options)


def test_values_of_one_bit_go_with_prod() -> None:
    codec = kv.get_method("turboquant", variant="prod", bits=3, value_bits=1).bind(LAYER)
    assert isinstance(codec.keys.coder, SketchCoder)
    assert isinstance(codec.values.coder, GainCoder)
    assert codec.schema.payload_bits == (3 + 1) * 64 * 2


def test_the_variants_compose_their_coders() -> None:
    tree = kv.get_method("turboquant", variant="rvq", bits=5).bind(LAYER)
    assert isinstance(tree.keys.coder, TreeCoder)
    assert isinstance(tree.values.coder, TreeCoder)
    plain = kv.get_method("turboquant", gain="unbiased").bind(LAYER)
    assert isinstance(plain.keys.coder, GainCoder)
    assert isinstance(plain.values.coder, GainCoder)
    assert (plain.keys.coder.form, plain.values.coder.form) == ("unbiased", "least-squares")


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([64, 72, 96, 128]))
def test_bits_per_channel_are_the_bits_and_a_gain(k: int, v: int, dim: int) -> None:
    layer = LayerSpec(kv_heads=2, query_heads=2, head_dim=dim)
    schema = kv.get_method("turboquant", key_bits=k, value_bits=v).bind(layer).schema
    assert schema.payload_bits == 2 * dim * (k + v)
    words = sum(-(-dim * bits // 32) * 4 for bits in (k, v))
    assert schema.bytes_per_token == 2 * (words + 4)


def test_the_rotation_is_shared_by_layers_and_changes_with_the_seed() -> None:
    method = kv.get_method("turboquant")
    one, two = (method.bind(LayerSpec(index=i, head_dim=64)) for i in (0, 1))
    assert one.keys.transform == two.keys.transform == one.values.transform
    other = kv.get_method("turboquant", seed=1).bind(LAYER)
    assert other.keys.transform != one.keys.transform
    sketch = kv.get_method("turboquant", variant="prod").bind(LAYER).keys.coder
    assert isinstance(sketch, SketchCoder)
    assert all(sketch.seed != 2 * seed for seed in range(5))


def offset_tokens(count: int) -> tuple[mx.array, mx.array]:
    """Keys whose mean before RoPE carries most of their energy, as those of real models do."""
    chance = np.random.default_rng(0)
    plain = chance.standard_normal((1, 2, count, 64)) + 4 * chance.standard_normal((1, 2, 1, 64))
    assert LAYER.rotary is not None
    keys = LAYER.rotary.rotate(mx.array(plain.astype(np.float32)), range(count))
    return keys, mx.array(chance.standard_normal((1, 2, count, 64)).astype(np.float32))


@frozen
class Means:
    """What a calibration holds of a layer, as far as it is read here."""

    key_mean: np.ndarray
    value_mean: np.ndarray
    fingerprint: str = "means"

    def moments(self, layer: LayerSpec) -> Means:
        assert layer == LAYER
        return self


def test_centring_pays_for_keys_with_an_offset() -> None:
    keys, values = offset_tokens(512)
    assert LAYER.rotary is not None
    plain = LAYER.rotary.unrotate(keys, range(512))
    means = Means(np.array(plain.mean(2))[0], np.array(values.mean(2))[0])
    error = {}
    for centre in ("none", "sequence", "calibrated"):
        extra = {"calibration": means} if centre == "calibrated" else {}
        codec = kv.get_method("turboquant", bits=2, centre=centre, **extra).bind(LAYER)
        decoded, _ = codec.decode(codec.encode(keys, values, range(512)), range(512))
        error[centre] = mx.square(decoded - keys).mean().item()
    assert error["sequence"] < 0.1 * error["none"]
    assert error["calibrated"] < error["sequence"]


def test_a_calibrated_centre_asks_for_its_calibration() -> None:
    method = kv.get_method("turboquant", centre="calibrated")
    with pytest.raises(kv.CalibrationRequired, match=r"turboquant.*kvcompress calibrate"):
        method.bind(LAYER)


def outlier_keys(count: int) -> mx.array:
    """A few channels a hundred times as large as the rest."""
    keys = np.random.default_rng(1).standard_normal((1, 2, count, 64)).astype(np.float32)
    keys[..., [3, 40]] *= 100
    return mx.array(keys)


def test_outlier_channels_cost_less_with_more_bits() -> None:
    # Queries do not look at the outlier channels, yet the codes spend their bits there: the
    # divergence of attention, not the cosine of keys, tells what that costs.
    layer = LayerSpec(kv_heads=2, query_heads=2, head_dim=64, dtype="float32")
    keys, values = outlier_keys(256), mx.random.normal((1, 2, 256, 64), key=mx.random.key(0))
    q = np.random.default_rng(2).standard_normal((1, 2, 32, 64)).astype(np.float32)
    q[..., [3, 40]] = 0
    divergence = []
    exact = mx.array(q) @ keys.swapaxes(-1, -2) / 8
    for bits in (2, 4, 6, 8):
        codec = kv.get_method("turboquant", bits=bits).bind(layer)
        decoded, _ = codec.decode(codec.encode(keys, values, range(256)), range(256))
        got = mx.array(q) @ decoded.swapaxes(-1, -2) / 8
        log_p, log_q = (s - mx.logsumexp(s, axis=-1, keepdims=True) for s in (exact, got))
        divergence.append((mx.exp(log_p) * (log_p - log_q)).sum(-1).mean().item())
    assert divergence == sorted(divergence, reverse=True)
    assert divergence[-1] < 0.05


def test_codes_are_the_same_in_another_process() -> None:
    script = (
        "import hashlib, mlx.core as mx, numpy as np, kvcompress as kv\n"
        "from kvcompress.layers import LayerSpec\n"
        "x = mx.array(np.random.default_rng(0).standard_normal((1, 1, 80, 72)), mx.float32)\n"
        "codec = kv.get_method('turboquant').bind(LayerSpec(head_dim=72, dtype='float32'))\n"
        "fields = codec.encode(x, x, range(80)).fields\n"
        "print(hashlib.sha256(b''.join(bytes(fields[n]) for n in sorted(fields))).hexdigest())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(runs[0]) > 60
    assert runs[0] == runs[1]


@pytest.mark.parametrize("plugin", ["kvcompress_baseline", "kvcompress_turboquant"])
def test_listing_imports_no_mlx(plugin: str) -> None:
    script = f"import sys, {plugin}; assert not {{'mlx', 'mlx_lm', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
