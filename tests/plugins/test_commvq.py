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
from kvcompress.cli.options import parse_method
from kvcompress.codec import KVCodec
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages.commuting_vq import CommutingVQ
from kvcompress.stages.gain import decode_gain
from kvcompress.stages.pairs import join_pairs, split_pairs
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.testing.calibration import synthetic_calibration, synthetic_samples
from kvcompress.testing.data import tokens
from kvcompress_commvq.tables import fit_keys, unit_rows

LAYER = LayerSpec(kv_heads=2, query_heads=4, head_dim=64, dtype="float32", rotary=Rotary(64))
FORMS = {
    "full": Rotary(64),
    "traditional": Rotary(64, traditional=True),
    "partial": Rotary(48),
    "table": Rotary(64, base=None, freqs=tuple(500.0 ** (np.arange(32) / 32))),
    "none": None,
}


@frozen(eq=False)
class Given:
    """A calibration of these tables and this mean of the keys."""

    held: dict[str, np.ndarray]
    key_mean: np.ndarray | None = None
    fingerprint: str = "given"

    def tables(self, method: object, layer: LayerSpec) -> dict[str, np.ndarray]:
        return self.held

    def moments(self, layer: LayerSpec) -> Given:
        return self


def method(**options: Any) -> Any:
    return kv.get_method("commvq", **{"calibration": synthetic_calibration(), **options})


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantiser(codec: KVCodec) -> CommutingVQ:
    found: CommutingVQ = codec.keys.coder.quantiser  # type: ignore[attr-defined]
    return found


def decoded(codec: KVCodec, keys: mx.array, start: int = 0) -> mx.array:
    positions = range(start, start + keys.shape[2])
    return codec.decode(codec.encode(keys, keys, positions), positions)[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3}, r"commvq: bits must be one of 1, 2 \(got 3\)"),
        ({"bits": 1.0}, r"commvq: bits must be one of 1, 2 \(got 1.0\)"),
        ({"stages": 0}, r"commvq: stages must be an integer from 1 to 64, or None \(got 0\)"),
        ({"stages": 65}, "commvq: stages must be an integer from 1 to 64"),
        ({"stages": 4, "codebook": "random"}, r"stages must be None for codebook='random' \(got 4"),
        ({"codebook": "learnt"}, "commvq: codebook must be one of 'random', or None"),
        ({"centre": "sequence"}, "commvq: centre must be one of 'calibrated', 'none'"),
    ],
)
def test_what_is_not_legal_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(kv.ConfigError, match=words):
        kv.get_method("commvq", **options)


def test_a_command_line_may_ask_for_stages() -> None:
    specs = parse_method("commvq:bits=1,2:stages=none,3")
    assert [tuple(spec.options.values()) for spec in specs] == [
        (1, None), (1, 3), (2, None), (2, 3),
    ]  # fmt: skip


@given(st.sampled_from([1, 2]), st.sampled_from([8, 16, 64, 80, 96, 128]), st.integers(1, 3))
def test_bits_are_those_of_the_paper(bits: int, dim: int, heads: int) -> None:
    layer = LayerSpec(kv_heads=heads, query_heads=heads, head_dim=dim, rotary=Rotary(dim))
    codec = kv.get_method("commvq", bits=bits, codebook="random").bind(layer)
    stages = quantiser(codec).stages
    assert stages == max(1, bits * dim // 12)
    codes, gain, values = codec.schema.fields
    assert (gain.name, gain.heads, gain.width) == ("k.gain", 1, 1)
    each = codes.payload_bits / dim + 8 * gain.bytes_per_token / (dim * heads)
    assert each == 12 * stages / dim + 16 / (dim * heads)
    assert values.payload_bits == bits * dim


@pytest.mark.parametrize("rotary", [None, Rotary(32)])
def test_a_rotation_must_be_known(rotary: Rotary | None) -> None:
    layer = LayerSpec(index=5, head_dim=64, rotary=rotary, rotary_known=False)
    words = "commvq: the rotation of layer 5 is not known.*such as turboquant or vecinfer"
    for options in ({}, {"codebook": "random"}):
        with pytest.raises(kv.ConfigError, match=words):
            kv.get_method("commvq", **options).bind(layer)
    with pytest.raises(kv.ConfigError, match=words):
        method().fit(synthetic_samples(layer), seed=0)


def test_values_that_cannot_be_cut_are_refused() -> None:
    layer = LayerSpec(index=2, head_dim=64, value_dim=36, rotary=Rotary(64))
    with pytest.raises(
        kv.ConfigError, match=r"commvq: value_dim 36 .* sub_dim 8 of bits=1 \(layer 2\); bits=2"
    ):
        method(bits=1).bind(layer)
    assert method(bits=2, codebook="random").bind(layer).schema.payload_bits


def test_without_a_calibration_the_command_is_told() -> None:
    with pytest.raises(
        kv.CalibrationRequired, match=r"kvcompress calibrate --method commvq:bits=1:stages=4 "
    ):
        kv.get_method("commvq", bits=1, stages=4).bind(LAYER)


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_rotation_is_fitted_and_read(form: str) -> None:
    layer = evolve(LAYER, rotary=FORMS[form])
    came = tokens(layer, 60, seed=8)
    codec = method(stages=3).bind(layer)
    assert (quantiser(codec).still is not None) == (form in ("partial", "none"))
    assert quantiser(codec).dim == 64
    error = np.square(np.array(decoded(codec, came.keys) - came.keys)).mean()
    assert error < 0.7 * np.square(np.array(came.keys)).mean()


def turned(vq: CommutingVQ, book: np.ndarray, codes: np.ndarray, position: int) -> np.ndarray:
    """What codes decode to when ``z`` is rotated to a position and ``i z`` is made of it anew.

    Args:
        vq: Says what rotates.
        book: ``(H, 2 R, N, D)``: of each stage what ``b`` adds, then what ``a`` adds.
        codes: ``(H, T, 2 R)``.
        position: Where the keys stand.
    """
    assert vq.rotary is not None
    direct = vq.rotary.rotate(mx.array(book[:, 1::2]).reshape(1, -1, 1, vq.dim), [position])
    direct = direct.reshape(book[:, 1::2].shape)
    first, second, _ = split_pairs(direct, vq.rotary)
    rest = split_pairs(mx.array(book[:, 0::2]), vq.rotary)[2]
    tables = np.stack([join_pairs(-second, first, rest, vq.rotary), direct], axis=2)
    tables = tables.reshape(book.shape)
    head, place = np.arange(len(book))[:, None, None], np.arange(book.shape[1])
    return np.asarray(tables[head, place, codes].sum(axis=2))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "none"])
@pytest.mark.parametrize("position", [1, 777, 32_768, 131_072])
def test_decoded_keys_turn_as_their_tables_do(form: str, position: int) -> None:
    codec = method(stages=3).bind(evolve(LAYER, rotary=FORMS[form]))
    vq, rotary = quantiser(codec), FORMS[form]
    assert rotary is not None
    codes = vq.encode(mx.array(normal(1, 2, 20, 64)))
    wanted = np.array(rotary.rotate(vq.decode(codes), [position] * 20)[0])
    book = np.array(vq.book())

    def off(tables: np.ndarray, rotated: np.ndarray) -> float:
        return float(np.abs(turned(vq, tables, np.array(codes)[0], position) - rotated).max())

    assert off(book, wanted) < 2e-5

    # With tables of its own for each role, which do not commute, the same test fails.
    free = normal(*book.shape, seed=1)
    head, place = np.arange(2)[:, None, None], np.arange(6)
    plain = free[head, place, np.array(codes)[0]].sum(axis=2)
    assert off(free, np.array(rotary.rotate(mx.array(plain)[None], [position] * 20)[0])) > 1


@pytest.mark.parametrize("position", [3, 5_000, 131_000])
def test_codes_do_not_depend_on_position(position: int) -> None:
    codec = method().bind(LAYER)
    assert LAYER.rotary is not None
    plain = (
        mx.array(normal(1, 2, 30, 64))
        + mx.array(synthetic_samples(LAYER).moments.key_mean)[None, :, None]
    )
    near = decoded(codec, LAYER.rotary.rotate(plain, range(30)))
    far = decoded(codec, LAYER.rotary.rotate(plain, range(position, position + 30)), position)
    back = LAYER.rotary.unrotate(far, range(position, position + 30))
    np.testing.assert_allclose(back, LAYER.rotary.unrotate(near, range(30)), atol=2e-3)


@given(st.integers(-20, 20), st.integers(0, 99))
def test_a_key_of_another_size_is_decoded_at_that_size(power: int, seed: int) -> None:
    codec = method(centre="none").bind(LAYER)
    keys = mx.array(normal(1, 2, 12, 64, seed=seed))
    factor = 2.0**power
    same = codec.encode(keys, keys, range(12)).fields["k.codes"]
    assert mx.array_equal(codec.encode(factor * keys, keys, range(12)).fields["k.codes"], same)
    assert mx.array_equal(decoded(codec, factor * keys), factor * decoded(codec, keys))


def test_the_gain_is_the_size_of_what_is_coded_in_all_heads() -> None:
    mean = normal(2, 64, seed=3)
    keys = normal(1, 2, 9, 64) * np.exp(normal(1, 2, 9, 1, seed=1))
    assert LAYER.rotary is not None
    posed = LAYER.rotary.rotate(mx.array(keys + mean[:, None]), range(9))
    codec = method(calibration=Given(dict(random_tables()), mean)).bind(LAYER)
    fields = codec.encode(posed, posed, range(9)).fields
    assert fields["k.gain"].shape == (1, 1, 9, 1)
    gain = np.array(decode_gain(fields["k.gain"]))[0, 0, :, 0]
    np.testing.assert_allclose(gain, np.sqrt(np.square(keys).mean((0, 1, 3))), rtol=2**-8)


def random_tables() -> dict[str, np.ndarray]:
    bound = kv.get_method("commvq", codebook="random").bind(LAYER)
    values: ProductVQ = bound.values.coder.quantiser  # type: ignore[attr-defined]
    return {
        "turning": np.array(quantiser(bound).turning),
        "still": np.zeros((2, quantiser(bound).stages, 2, 64, 0), dtype=np.float16),
        "values": np.array(values.codebook),
    }


def test_keys_made_of_the_tables_are_met_exactly() -> None:
    # Odd entries fill the first half of the pairs and even ones the second, each of modulus 2:
    # an odd and an even one add up to a row of root mean square 1 whatever the phases.
    phases = 2j * np.pi * np.random.default_rng(0).random((2, 64, 32))
    table = np.sqrt(2) * np.exp(phases)
    table[:, 1::2, 16:], table[:, 2::2, :16], table[:, 0] = 0, 0, 0
    turning = np.stack([table.real, table.imag], axis=2)[:, None].astype(np.float32)
    held = {**random_tables(), "turning": turning, "still": np.zeros((2, 1, 2, 64, 0), np.float32)}
    a, b = 2 * np.arange(30) + 1, 62 - 2 * np.arange(30)
    centres = table[:, a] + 1j * table[:, b]
    gain = 2.0 ** np.arange(-15, 15)[:, None]
    plain = gain * np.concatenate([centres.real, centres.imag], axis=-1)
    rotary = LAYER.rotary
    assert rotary is not None
    keys = rotary.rotate(mx.array(plain[None].astype(np.float32)), range(30))
    codec = method(stages=1, centre="none", calibration=Given(held)).bind(LAYER)
    codes = codec.encode(keys, keys, range(30))
    out = np.array(rotary.unrotate(codec.decode(codes, range(30))[0], range(30)))[0]
    np.testing.assert_allclose(out / gain, plain / gain, atol=1e-5)
    index = np.array(codes.fields["k.codes"])[0, :, :, 0]
    np.testing.assert_array_equal(index, np.broadcast_to(64 * a + b, (2, 30)))


def test_values_are_plain_product_quantisation() -> None:
    for bits, size in ((1, 8), (2, 4)):
        commvq = method(bits=bits)
        codebook = synthetic_calibration().tables(commvq, LAYER)["values"]
        assert codebook.shape == (2, 64 // size, 256, size)
        assert codebook.dtype == np.float16
        plain, came = ProductVQ(codebook), tokens(LAYER, 30)
        codec = commvq.bind(LAYER)
        codes = codec.encode(came.keys, came.values, came.positions)
        out = codec.decode(codes, came.positions)[1]
        assert mx.array_equal(out, plain.decode(plain.encode(came.values)))


def test_every_stage_lowers_the_error() -> None:
    came, errors = tokens(LAYER, 100, seed=4), []
    whole = dict(synthetic_calibration().tables(method(stages=8), LAYER))
    mean = synthetic_calibration().moments(LAYER).key_mean
    for stages in range(1, 9):
        cut = {
            **whole,
            "turning": whole["turning"][:, :stages],
            "still": whole["still"][:, :stages],
        }
        codec = method(stages=stages, calibration=Given(cut, mean)).bind(LAYER)
        errors.append(float(mx.square(decoded(codec, came.keys) - came.keys).mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.7 * errors[0]


def test_fits_are_the_same_twice_and_tell_how_well_they_are() -> None:
    samples = synthetic_samples(evolve(LAYER, rotary=FORMS["partial"]))
    one, two = (method(bits=1).fit(samples, seed=3) for _ in range(2))
    assert set(one) == {
        "turning", "still", "values",
        "report.keys_left", "report.values_left", "report.dead_centroids",
    }  # fmt: skip
    for name in one:
        assert np.array_equal(one[name], two[name])
    assert one["turning"].shape == (2, 5, 64, 2, 24)
    assert one["still"].shape == (2, 5, 2, 64, 16)
    assert one["turning"].dtype == one["still"].dtype == np.float16
    assert not one["turning"][:, :, 0].any()
    assert 0 < one["report.keys_left"] < 0.5
    assert 0 < one["report.values_left"] < 0.5
    other = method(bits=1).fit(samples, seed=4)
    assert not np.array_equal(one["turning"], other["turning"])


def test_entries_that_serve_no_token_are_counted() -> None:
    lone = np.zeros((400, 2, 64), dtype=np.float32)
    lone[::2, :, 3], lone[1::2, :, 40] = 1.0, -1.0  # two keys and no other
    found = fit_keys(lone, LAYER, 1, 0)
    assert found["report.keys_left"] < 1e-6
    assert found["report.dead_centroids"] >= 2 * 59
    rich = fit_keys(normal(400, 2, 64), LAYER, 1, 0)
    assert rich["report.dead_centroids"] < 2 * 20


def test_rows_are_fitted_as_they_are_coded() -> None:
    keys = normal(50, 2, 64) * np.exp(2 * normal(50, 1, 1, seed=1))
    keys[7] = 0
    rows = unit_rows(keys)
    size = np.sqrt(np.square(rows).mean((1, 2)))
    assert size[7] == 0
    np.testing.assert_allclose(np.delete(size, 7), 1.0, rtol=2**-8)


def test_taking_the_mean_out_pays() -> None:
    came = tokens(LAYER, 200, seed=9)
    with_mean, without = (
        float(
            mx.square(decoded(method(bits=1, centre=c).bind(LAYER), came.keys) - came.keys).mean()
        )
        for c in ("none", "calibrated")
    )
    assert without < with_mean


def test_random_tables_are_asked_for_by_name() -> None:
    one, two = (kv.get_method("commvq", codebook="random").bind(LAYER) for _ in range(2))
    assert quantiser(one).turning is quantiser(two).turning
    assert not one.keys.centre.active
    other = kv.get_method("commvq", codebook="random", seed=1).bind(LAYER)
    assert not mx.array_equal(quantiser(one).turning, quantiser(other).turning)
    keys = mx.array(normal(1, 2, 50, 64))
    assert mx.square(decoded(one, keys) - keys).mean().item() < 0.5


def test_too_few_tokens_are_refused() -> None:
    samples = synthetic_samples(LAYER).thinned(50)
    with pytest.raises(kv.ConfigError, match=r"64 entries need as many points \(got 44\)"):
        method().fit(samples, seed=0)


def test_listing_imports_no_mlx() -> None:
    script = (
        "import sys, kvcompress_commvq; assert not {'mlx', 'mlx_lm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
