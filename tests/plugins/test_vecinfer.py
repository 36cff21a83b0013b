from __future__ import annotations

import subprocess
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

import kvcompress as kv
from kvcompress.calibrate.fitting import fit_layers
from kvcompress.cli.options import parse_method
from kvcompress.codec import KVCodec
from kvcompress.fit.product import ProductBooks
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.testing.calibration import synthetic_calibration, synthetic_samples
from kvcompress.testing.data import tokens
from kvcompress_vecinfer.tables import POSITIONS, channel_scale, spread

LAYER = LayerSpec(kv_heads=2, query_heads=4, head_dim=64, dtype="float32", rotary=Rotary(64))
BITS = (1.0, 1.25, 1.5, 2.0)


@frozen(eq=False)
class Given:
    """A calibration of these tables and means."""

    held: dict[str, np.ndarray]
    key_mean: np.ndarray | None = None
    value_mean: np.ndarray | None = None
    fingerprint: str = "given"

    def tables(self, method: object, layer: LayerSpec) -> dict[str, np.ndarray]:
        return self.held

    def moments(self, layer: LayerSpec) -> Given:
        return self


def method(**options: Any) -> Any:
    return kv.get_method("vecinfer", **{"calibration": synthetic_calibration(), **options})


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def decoded(codec: KVCodec, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    positions = range(keys.shape[2])
    return codec.decode(codec.encode(keys, values, positions), positions)


@pytest.mark.parametrize("bits", [0, 1.3, 3, 4.0, "2", None, True, float("nan")])
def test_bits_are_one_of_the_presets(bits: object) -> None:
    with pytest.raises(kv.ConfigError, match=r"vecinfer: bits must be one of 1, 1.25, 1.5, 2 \("):
        kv.get_method("vecinfer", bits=bits)


def test_a_command_line_names_the_presets() -> None:
    specs = parse_method("vecinfer:bits=1,1.25,1.5,2:codebooks=sub-space")
    assert [spec.options["bits"] for spec in specs] == list(BITS)
    with pytest.raises(kv.ConfigError, match=r"one of 1, 1.25, 1.5, 2 \(got '1.3'\)"):
        parse_method("vecinfer:bits=1.3")


@pytest.mark.parametrize("bits", BITS)
def test_bits_are_those_of_keys_and_values_together(bits: float) -> None:
    schema = method(bits=bits).bind(LAYER).schema
    assert schema.payload_bits == bits * 2 * 64 * LAYER.kv_heads
    assert 8 * schema.bytes_per_token == schema.payload_bits
    sizes = {field.name: field.payload_bits for field in schema.fields}
    assert sizes["v.codes"] <= sizes["k.codes"]


@pytest.mark.parametrize(
    ("layer", "bits", "words"),
    [
        (LayerSpec(index=3, head_dim=100), 1, r"head_dim 100 .* sub_dim 8 of bits=1 \(layer 3\)"),
        (LayerSpec(head_dim=63), 2, r"head_dim 63 is not divisible by sub_dim 4 of bits=2"),
        (LayerSpec(head_dim=64, value_dim=36), 1.25, r"value_dim 36 is not divisible by sub_dim 8"),
    ],
)
def test_heads_that_cannot_be_cut_are_refused(layer: LayerSpec, bits: float, words: str) -> None:
    vecinfer = kv.get_method("vecinfer", bits=bits)  # with or without a calibration
    with pytest.raises(kv.ConfigError, match=f"vecinfer: {words}.*bits=2 takes multiples of 4"):
        vecinfer.bind(layer)
    with pytest.raises(kv.ConfigError, match=f"vecinfer: {words}"):
        method(bits=bits).fit(synthetic_samples(layer), seed=0)


def test_without_a_calibration_the_command_is_told() -> None:
    with pytest.raises(
        kv.CalibrationRequired, match=r"kvcompress calibrate --method vecinfer:bits=1.25 "
    ):
        kv.get_method("vecinfer", bits=1.25).bind(LAYER)


def test_random_codebooks_are_asked_for_by_name() -> None:
    one, two = (kv.get_method("vecinfer", codebook="random").bind(LAYER) for _ in range(2))
    assert one.keys.coder.quantiser.codebook is two.keys.coder.quantiser.codebook
    assert not one.keys.centre.active
    other = kv.get_method("vecinfer", codebook="random", seed=1).bind(LAYER)
    assert not mx.array_equal(
        other.keys.coder.quantiser.codebook, one.keys.coder.quantiser.codebook
    )
    for books, shape in (("head", (2, 1)), ("sub-space", (2, 8))):
        codec = kv.get_method("vecinfer", codebook="random", codebooks=books, bits=1.5).bind(LAYER)
        assert codec.values.coder.quantiser.codebook.shape == (*shape, 4096, 8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("books", ["layer", "sub-space"])
def test_untransformed_it_is_plain_product_quantisation(bits: float, books: str) -> None:
    vecinfer = method(bits=bits, codebooks=books, smooth=False, hadamard=False, centre="none")
    codec = vecinfer.bind(LAYER)
    came = tokens(LAYER, 40)
    codes = codec.encode(came.keys, came.values, came.positions)
    tables = synthetic_calibration().tables(vecinfer, LAYER)
    assert "scale" not in tables
    for name, x, out in zip(
        ("keys", "values"),
        (came.keys, came.values),
        codec.decode(codes, came.positions),
        strict=True,
    ):
        assert tables[name].dtype == np.float16
        plain = ProductVQ(tables[name], 64)
        assert mx.array_equal(out, plain.decode(plain.encode(x)))


@given(
    st.sampled_from([48, 64, 80, 96]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
    st.integers(1, 4),
)
def test_scale_and_mixing_leave_scores_alone(
    dim: int, smooth: bool, hadamard: bool, seed: int, group: int
) -> None:
    layer = evolve(LAYER, head_dim=dim, value_dim=dim, query_heads=2 * group, rotary=Rotary(dim))
    tables = {
        "keys": normal(1, 1, 256, 4),
        "values": normal(1, 1, 256, 4),
        **({"scale": np.exp(normal(2, dim, seed=seed))} if smooth else {}),
    }
    options = {"smooth": smooth, "hadamard": hadamard, "seed": seed, "centre": "none"}
    codec = method(**options, calibration=Given(tables)).bind(layer)
    q, k = normal(1, 2, 3 * group, dim, seed=seed), normal(1, 2, 9, dim, seed=seed + 1)
    seen = codec.queries(mx.array(q), range(3)).mapped
    got = seen @ codec.keys.transform.forward(mx.array(k)).swapaxes(-1, -2)
    wanted = q.astype(np.float64) @ k.swapaxes(-1, -2)
    np.testing.assert_allclose(got, wanted, atol=2e-5 * dim)


def test_a_codebook_that_holds_the_data_loses_nothing() -> None:
    keys, values = normal(1, 2, 16, 64), normal(1, 2, 16, 64, seed=1)
    scale = np.exp(normal(2, 64, seed=2))
    empty = {"keys": normal(1, 1, 256, 4), "values": normal(1, 1, 256, 4), "scale": scale}
    options = {"codebooks": "sub-space", "centre": "none"}
    transform = method(**options, calibration=Given(empty)).bind(LAYER).keys.transform
    held = {"keys": np.array(transform.forward(mx.array(keys))), "values": values}
    tables = {
        name: np.tile(z[0].reshape(2, 16, 16, 4).swapaxes(1, 2), (1, 1, 16, 1))
        for name, z in held.items()
    }
    codec = method(**options, calibration=Given({**tables, "scale": scale})).bind(LAYER)
    got_keys, got_values = decoded(codec, mx.array(keys), mx.array(values))
    np.testing.assert_allclose(got_keys, keys, atol=2e-5)
    np.testing.assert_array_equal(got_values, values)


@pytest.mark.parametrize("options", [{}, {"codebook": "random"}])
def test_what_is_nothing_stays_nothing(options: dict[str, str]) -> None:
    codec = method(centre="none", **options).bind(LAYER)
    nothing = mx.zeros((1, 2, 5, 64))
    for got in decoded(codec, nothing, nothing):
        assert not got.any().item()


def test_a_shared_head_is_a_head_for_each_of_its_queries() -> None:
    vecinfer = method(codebooks="sub-space")
    tables = dict(synthetic_calibration().tables(vecinfer, LAYER))
    moments = synthetic_calibration().moments(LAYER)
    apart = evolve(LAYER, kv_heads=4)
    repeated = Given(
        {name: np.repeat(table, 2, axis=0) for name, table in tables.items()},
        np.repeat(moments.key_mean, 2, axis=0),
        np.repeat(moments.value_mean, 2, axis=0),
    )
    came = tokens(LAYER, 50)
    twice = [mx.repeat(x, 2, axis=1) for x in (came.keys, came.values)]
    queries = came.queries[:, :, -3:]
    outs = []
    for codec, keys, values in (
        (vecinfer.bind(LAYER), came.keys, came.values),
        (evolve(vecinfer, calibration=repeated).bind(apart), *twice),
    ):
        codes = codec.encode(keys, values, came.positions)
        rows = queries.reshape(1, codec.layer.kv_heads, -1, 64)
        scores = codec.scores(codec.queries(rows, range(47, 50)), codes, came.positions)
        weights = mx.softmax(scores / 8, axis=-1)
        mixed = codec.mix(weights, codes)
        out = codec.outputs(mixed, weights.sum(axis=-1, keepdims=True), codes.constants)
        outs.append(np.array(out).reshape(4, 3, 64))
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)


def test_a_scale_is_the_root_of_the_largest_magnitude() -> None:
    keys = normal(100, 3, 8)
    keys[:, 0, 2] = 0
    keys[:, 1] = 0
    scale = channel_scale(keys)
    assert scale.dtype == np.float32
    wanted = np.sqrt(np.abs(keys).max(axis=0))
    live = wanted > 0
    np.testing.assert_allclose(scale[live], wanted[live], rtol=1e-6)
    assert scale[0, 2] == pytest.approx(1e-4 * np.median(wanted[0][live[0]]))
    assert (scale[1] == 1).all()


def test_a_scale_is_of_its_own_head() -> None:
    keys = normal(100, 3, 8)
    louder = keys * np.array([1.0, 100.0, 1.0], dtype=np.float32)[:, None]
    before, after = channel_scale(keys), channel_scale(louder)
    np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
    np.testing.assert_allclose(after[1], 10 * before[1], rtol=1e-6)


def test_keys_are_spread_evenly_over_a_long_context() -> None:
    samples = synthetic_samples(LAYER)
    places = spread(samples, 5).positions
    steps = np.diff(np.sort(places))
    assert places.min() == 0
    assert places.max() >= POSITIONS - steps.max()
    assert steps.min() > 0
    assert steps.max() - steps.min() <= 1
    assert (np.diff(places) < 0).sum() > len(places) / 4
    assert not np.array_equal(places, spread(samples, 6).positions)


def test_a_scale_sees_slow_pairs_turn() -> None:
    # A pair with one live channel, which within a window of 320 tokens hardly turns.
    samples = synthetic_samples(evolve(LAYER, rotary=Rotary(64, base=1e4)))
    keys = np.zeros_like(samples.keys)
    keys[..., 28] = 9.0  # turns by 1/3 radian per thousand positions
    fitted = method(centre="none").fit(evolve(samples, keys=keys), seed=0)
    assert fitted["scale"][:, 28] == pytest.approx(3.0, rel=1e-2)
    assert (fitted["scale"][:, 60] > 2.0).all()


def test_fits_are_the_same_twice_and_tell_how_well_they_are() -> None:
    samples = synthetic_samples(LAYER)
    one, two = (method(bits=1).fit(samples, seed=3) for _ in range(2))
    assert set(one) == {
        "scale", "keys", "values",
        "report.keys_left", "report.values_left", "report.dead_centroids",
    }  # fmt: skip
    for name in one:
        assert np.array_equal(one[name], two[name])
    assert one["keys"].shape == one["values"].shape == (1, 1, 256, 8)
    assert one["keys"].dtype == one["values"].dtype == np.float16
    assert 0.2 < one["report.keys_left"] < 0.4
    assert 0.2 < one["report.values_left"] < 0.4
    assert one["report.dead_centroids"] == 0
    other = method(bits=1).fit(samples, seed=4)
    assert not np.array_equal(one["keys"], other["keys"])


def error(codec: KVCodec, keys: mx.array, values: mx.array) -> float:
    return float(mx.square(decoded(codec, keys, values)[0] - keys).mean())


def test_taking_the_mean_out_pays() -> None:
    came = tokens(LAYER, 200, seed=9)
    with_mean, without = (
        error(method(bits=1, centre=centre).bind(LAYER), came.keys, came.values)
        for centre in ("none", "calibrated")
    )
    assert without < 0.7 * with_mean


def test_channels_are_scaled_before_they_are_mixed() -> None:
    # A few outlier channels, which queries hardly see: mixed as they are, they drown the others.
    layer = evolve(LAYER, rotary=None)
    factor = np.ones(64, dtype=np.float32)
    factor[[3, 17, 40]] = 10.0
    samples = evolve(synthetic_samples(layer), keys=factor * normal(320, 2, 64, seed=2))
    keys = mx.array(factor * normal(1, 2, 300, 64))
    q = normal(1, 2, 50, 64, seed=1) / factor
    off = {}
    for smooth, hadamard in ((False, False), (True, False), (False, True), (True, True)):
        vecinfer = method(bits=1, smooth=smooth, hadamard=hadamard, centre="none")
        tables = {name: np.asarray(t) for name, t in vecinfer.fit(samples, seed=0).items()}
        codec = evolve(vecinfer, calibration=Given(tables)).bind(layer)
        wrong = q @ np.array(decoded(codec, keys, keys)[0] - keys).swapaxes(-1, -2)
        off[smooth, hadamard] = float(np.square(wrong).mean())
    assert off[True, False] < 0.9 * off[False, False]
    assert off[True, True] < 0.9 * off[False, False]
    assert off[True, True] < 0.5 * off[False, True]


def test_tables_are_for_the_options_they_were_fitted_for() -> None:
    samples = synthetic_samples(LAYER)
    fit = fit_layers(kv.get_method("vecinfer", bits=1), [samples], 0)
    calibration = kv.Calibration(
        layers=(LAYER,), recorded=(samples.moments,), fits=[fit], provenance={}
    )
    kv.get_method("vecinfer", bits=1, window=7, calibration=calibration).bind(LAYER)
    for option, value in (("bits", 2), ("seed", 1), ("smooth", False), ("codebooks", "head")):
        with pytest.raises(kv.CalibrationMismatch, match=option):
            kv.get_method("vecinfer", **{"bits": 1, option: value}, calibration=calibration).bind(
                LAYER
            )


def test_centroids_are_those_that_want_tokens() -> None:
    counts = [method(bits=bits).centroids for bits in BITS]
    assert counts == [32, 512, 512, 32]
    assert method(bits=1.25, codebooks="sub-space").centroids == 4096


def test_listing_imports_no_mlx() -> None:
    script = (
        "import sys, kvcompress_vecinfer; assert not {'mlx', 'mlx_lm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(("codebooks", "seen"), [("sub-space", 5000), ("head", 4096)])
def test_a_codebook_of_one_sub_space_sees_more_tokens(
    codebooks: str, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def fit(vectors: np.ndarray, size: int, entries: int, **_: Any) -> Any:
        sizes.append(vectors.shape[1])
        return ProductBooks(np.zeros((1, 1, entries, size), np.float32), np.ones(1), 0)

    monkeypatch.setattr("kvcompress_vecinfer.method.fit_product", fit)
    samples = synthetic_samples(LAYER)
    rows = np.arange(5000) % len(samples.keys)
    long = evolve(
        samples,
        keys=samples.keys[rows],
        values=samples.values[rows],
        positions=samples.positions[rows],
    )
    method(codebooks=codebooks).fit(long, seed=0)
    assert sizes == [seen, seen]
