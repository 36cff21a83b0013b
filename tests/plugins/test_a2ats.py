from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcompress as kv
from kvcompress.cache import CompressedKVCache
from kvcompress.cli.options import parse_method
from kvcompress.codec import KVCodec
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages.blended_vq import BlendedVQ
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.testing.calibration import synthetic_calibration
from kvcompress.testing.data import tokens
from kvcompress_a2ats.tables import own_metric

LAYER = LayerSpec(kv_heads=2, query_heads=4, head_dim=64, dtype="float32", rotary=Rotary(64))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bound(layer: LayerSpec = LAYER, **options: Any) -> KVCodec:
    """Six bits keep fits small."""
    chosen = {"codebook_bits": 6, **options}
    return kv.get_method("a2ats", calibration=synthetic_calibration(), **chosen).bind(layer)


def quantiser(codec: KVCodec) -> Any:
    return codec.keys.coder.quantiser  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sub_dim": 3}, r"a2ats: sub_dim must be one of 2, 4, 8, 16 \(got 3\)"),
        ({"subdim": 8}, r"a2ats: unknown option 'subdim'; did you mean 'sub_dim'\?"),
        ({"codebook_bits": 13}, r"codebook_bits must be an integer from 2 to 12 \(got 13\)"),
        ({"beta": 1.5}, r"beta must be .*from 0 to 1 \(got 1.5\)"),
        ({"b": -1}, r"b must be an integer from 0 to 1048576 \(got -1\)"),
        ({"growth": 1.0}, r"growth must be .*from 1.05 to 64.0 \(got 1.0\)"),
        ({"rope": "windowed"}, r"rope must be one of 'banded', 'single', 'exact'"),
        ({"codebook": "rand"}, r"codebook must be 'random' or an array"),
        ({"codebook": normal(255, 8)}, r"codebook must have shape \(256, 8\), .*got \(255, 8\)"),
        ({"codebook": normal(8)}, r"codebook must have shape .*got \(8,\)"),
        ({"query_h": np.eye(4)}, r"query_h must have shape \(8, 8\) to match sub_dim=8.*\(4, 4\)"),
        ({"query_h": np.triu(np.ones((8, 8)))}, r"query_h must be symmetric"),
        ({"query_h": -np.eye(8)}, r"query_h must be positive"),
        ({"query_h": np.zeros((8, 8))}, r"query_h must be positive"),
        ({"query_h": np.eye(8), "use_query_aware": False}, r"query_h must be None with"),
        ({"value_codebook": normal(256, 8)}, r"value_codebook must be None unless codebook"),
    ],
)
def test_what_is_not_legal_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(kv.ConfigError, match=text):
        kv.get_method("a2ats", **options)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (LayerSpec(head_dim=100), r"head_dim 100 is not divisible by sub_dim 8 \(layer 0\)"),
        (LayerSpec(head_dim=63), r"head_dim must be even \(layer 0 has 63\)"),
        (LayerSpec(head_dim=64, value_dim=36), r"value_dim 36 is not divisible by sub_dim 8"),
        (LayerSpec(rotary_known=False), r"rotation of layer 0 is not known"),
    ],
)
def test_layers_that_do_not_fit_are_refused_at_bind(layer: LayerSpec, text: str) -> None:
    with pytest.raises(kv.ConfigError, match=f"a2ats: .*{text}"):
        kv.get_method("a2ats", codebook="random").bind(layer)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codebook": normal(3, 256, 8)}, r"codebook of shape \(3, 256, 8\) is for 3 heads"),
        ({"codebook": normal(2, 5, 256, 8)}, r"is for 2 heads and 5 sub-vectors; layer 0 has 2"),
        ({"codebook": 1e30 * np.ones((256, 8))}, "codebook must be finite in float16"),
        ({"codebook": "random", "query_h": np.stack([np.eye(8)] * 3)}, "for the 2 KV heads"),
    ],
)
def test_arrays_for_other_heads_are_refused_at_bind(options: dict[str, Any], text: str) -> None:
    with pytest.raises(kv.ConfigError, match=text):
        kv.get_method("a2ats", **options).bind(LAYER)


def test_there_is_no_codebook_unless_one_is_asked_for() -> None:
    with pytest.raises(kv.CalibrationRequired, match="kvcompress calibrate --method a2ats"):
        kv.get_method("a2ats").bind(LAYER)
    one, two = (kv.get_method("a2ats", codebook="random").bind(LAYER) for _ in range(2))
    assert quantiser(one).book.codebook is quantiser(two).book.codebook


def test_defaults_are_those_that_users_of_the_method_know() -> None:
    config = kv.get_method("a2ats").config()
    known = {
        "window": 128, "sub_dim": 8, "codebook_bits": 8, "use_query_aware": True, "query_h": None,
        "beta": 0.5, "retrieval_fraction": 0.2, "b": 2048, "codebook": None,
    }  # fmt: skip
    assert {name: config[name] for name in known} == known


@pytest.mark.parametrize(
    ("sub_dim", "bits", "average", "ratio", "book"),
    [(8, 8, 1.0, 16.0, 4096), (4, 8, 2.0, 8.0, 2048), (8, 4, 0.5, 32.0, 256)],
)
def test_the_numbers_of_the_report(
    sub_dim: int, bits: int, average: float, ratio: float, book: int
) -> None:
    method = kv.get_method(
        "a2ats",
        sub_dim=sub_dim,
        codebook_bits=bits,
        codebook=normal(2**bits, sub_dim),
        window=16,
        sinks=4,
    )
    cache = CompressedKVCache(method, LAYER, method.bind(LAYER))
    came = tokens(LAYER, 116, seed=1)
    cache.update_and_fetch(came.keys, came.values)
    numbers = kv.report([cache])
    assert numbers.assigned_avg_bits == average
    assert numbers.compression_ratio == ratio
    assert numbers.codebook_bytes == book
    assert (numbers.tokens_seen, numbers.tokens_exact) == (116, 20)
    coded_bytes = int(96 * 2 * 64 * average / 8)
    assert numbers.compressed_key_bytes == numbers.compressed_value_bytes == coded_bytes
    assert numbers.fp16_key_bytes == numbers.fp16_value_bytes == 96 * 2 * 64 * 2
    assert numbers.stored_bytes == numbers.predicted_bytes


def test_the_three_forms_of_rope_read_the_same_codes() -> None:
    came = tokens(LAYER, 40, seed=2)
    coded = [
        bound(rope=rope).encode(came.keys, came.values, came.positions)
        for rope in ("exact", "banded", "single")
    ]
    for other in coded[1:]:
        assert other.fields.keys() == coded[0].fields.keys()
        for name, field in other.fields.items():
            assert mx.array_equal(field, coded[0].fields[name])


def scores(codec: KVCodec, q: mx.array, place: int, came: Any) -> np.ndarray:
    """Scores of one query at ``place`` against coded tokens."""
    codes = codec.encode(came.keys, came.values, came.positions)
    ready = codec.queries(q, range(place, place + 1))
    return np.array(codec.scores(ready, codes, came.positions))


def test_one_rotation_is_exact_at_its_distance_and_blind_to_the_key_s_place() -> None:
    came = tokens(LAYER, 60, seed=3)
    q = LAYER.rotary.rotate(mx.array(normal(1, 2, 2, 64)), range(100, 101))  # type: ignore[union-attr]
    single, exact = bound(rope="single", b=70), bound(rope="exact")
    at = scores(single, q, 100, came), scores(exact, q, 100, came)
    np.testing.assert_allclose(at[0][..., 30], at[1][..., 30], atol=2e-4)
    # Where the query stands does not matter to its far scores: it bears R_b whatever it is.
    moved = LAYER.rotary.rotate(LAYER.rotary.unrotate(q, range(100, 101)), range(500, 501))  # type: ignore[union-attr]
    np.testing.assert_allclose(scores(single, moved, 500, came), at[0], atol=2e-3)


def test_narrower_bands_err_less() -> None:
    came = tokens(LAYER, 400, seed=4)
    q = LAYER.rotary.rotate(mx.array(normal(1, 2, 2, 64)), range(500, 501))  # type: ignore[union-attr]
    exact = scores(bound(rope="exact"), q, 500, came)
    errors = [
        float(np.square(scores(bound(window=64, **form), q, 500, came) - exact).mean())
        for form in (
            {"growth": 1.1},
            {"growth": 2.0},
            {"growth": 8.0},
            {"rope": "single", "b": 2048},
        )
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.2 * errors[-1]


def test_queries_alike_in_all_channels_make_no_difference() -> None:
    book = normal(256, 8)
    came = tokens(LAYER, 64, seed=5)
    plain, aware = (
        kv.get_method("a2ats", codebook=book, **options).bind(LAYER)
        for options in ({"use_query_aware": False}, {"query_h": 3.7 * np.eye(8)})
    )
    one, two = (c.encode(came.keys, came.values, came.positions) for c in (plain, aware))
    assert mx.array_equal(one.fields["k.codes"], two.fields["k.codes"])


def test_a_part_of_the_tokens_gets_the_query_aware_centroid() -> None:
    codec = bound()
    assert codec.careful_fraction == 0.2
    came = tokens(LAYER, 64, seed=5)
    all_careful, plain = (
        np.array(
            codec.encode(came.keys, came.values, came.positions, careful=marks).fields["k.codes"]
        )
        for marks in (None, mx.zeros((1, 64), mx.bool_))
    )
    assert (all_careful != plain).any()
    aware = bound(retrieval_fraction=1.0)
    np.testing.assert_array_equal(
        aware.encode(came.keys, came.values, came.positions).fields["k.codes"], all_careful
    )


def test_the_plain_metric_is_that_of_lengths_before_the_map() -> None:
    scales = np.geomspace(0.5, 4, 16)
    maps = np.stack([np.diag(scales), np.eye(16)])
    blocks = own_metric(maps, 8)
    expected = scales**-2 / (scales**-2).mean()
    np.testing.assert_allclose(np.einsum("nii->ni", blocks[0]).ravel(), expected, rtol=1e-4)
    np.testing.assert_allclose(blocks[1], np.broadcast_to(np.eye(8), (2, 8, 8)), atol=1e-12)


@pytest.mark.parametrize(("part", "of_each_block"), [(0.2, 7), (1.0, 32), (0.0, 0)])
def test_the_report_counts_the_tokens_that_got_it(part: float, of_each_block: int) -> None:
    method = kv.get_method(
        "a2ats",
        codebook_bits=6,
        calibration=synthetic_calibration(),
        retrieval_fraction=part,
        window=16,
        sinks=4,
        block=32,
    )
    cache = CompressedKVCache(method, LAYER, method.bind(LAYER))
    came = tokens(LAYER, 116, seed=1)
    cache.update_and_fetch(came.keys, came.values)
    assert kv.report([cache]).tokens_retrieved == 3 * of_each_block


def test_a_given_codebook_serves_values_too_unless_they_have_their_own() -> None:
    book, other = normal(256, 8), normal(256, 8, seed=1)
    shared = kv.get_method("a2ats", codebook=book).bind(LAYER)
    assert shared.values.coder.quantiser.codebook is quantiser(shared).book.codebook  # type: ignore[attr-defined]
    own = kv.get_method("a2ats", codebook=book, value_codebook=other).bind(LAYER)
    np.testing.assert_array_equal(
        np.array(own.values.coder.quantiser.codebook)[0, 0],  # type: ignore[attr-defined]
        other.astype(np.float16),
    )


def test_what_is_known_of_the_queries_decides_the_assignment() -> None:
    book = normal(256, 8)

    def made(**options: Any) -> Any:
        return quantiser(kv.get_method("a2ats", codebook=book, **options).bind(LAYER))

    assert isinstance(made(), BlendedVQ)
    assert made().beta == 0.5
    assert isinstance(made(beta=0.0), ProductVQ)
    assert made(use_query_aware=False).metric is None
    assert made(query_h=np.eye(8)).metric.shape == (1, 8, 8, 8)
    assert made(query_h=np.stack([np.eye(8)] * 2)).metric.shape == (2, 8, 8, 8)
    assert made(calibration=synthetic_calibration()).metric.shape == (2, 8, 8, 8)


@given(st.sampled_from([4, 8]), st.integers(0, 20))
def test_a_codebook_that_holds_the_data_gives_no_error(size: int, seed: int) -> None:
    came = tokens(LAYER, 16, seed=seed)
    plain = np.array(LAYER.rotary.unrotate(came.keys, came.positions))[0]  # type: ignore[union-attr]
    rounded = plain.astype(np.float16).astype(np.float32)
    keys = LAYER.rotary.rotate(mx.array(rounded)[None], came.positions)  # type: ignore[union-attr]
    n = 64 // size
    book = rounded.reshape(2, 16, n, size).swapaxes(1, 2)
    values = mx.array(rounded)[None]
    method = kv.get_method(
        "a2ats", sub_dim=size, codebook_bits=4, codebook=book, rope="exact", use_query_aware=False
    )
    codec = method.bind(LAYER)
    decoded = codec.decode(codec.encode(keys, values, came.positions), came.positions)
    np.testing.assert_allclose(decoded[0], keys, atol=2e-3)
    np.testing.assert_array_equal(decoded[1], values)


def test_fitted_codes_for_the_queries_err_less_in_scores() -> None:
    layer = LayerSpec(kv_heads=1, query_heads=1, head_dim=16, dtype="float32")
    samples = synthetic_calibration()
    came = tokens(layer, 400, seed=6)
    spread = np.geomspace(4, 0.05, 16).astype(np.float32)
    moment = np.diag(spread.astype(np.float64) ** 2)
    q = normal(500, 16) * spread
    errors = {}
    for aware in (True, False):
        method = kv.get_method(
            "a2ats",
            sub_dim=16,
            codebook_bits=6,
            use_query_aware=aware,
            query_h=moment if aware else None,
            calibration=samples,
        )
        codec = method.bind(layer)
        keys, _ = codec.decode(codec.encode(came.keys, came.values, came.positions), came.positions)
        errors[aware] = float(np.square(q @ np.array(came.keys - keys)[0, 0].T).mean())
    assert errors[True] < 0.7 * errors[False]


def test_a_codebook_that_a_command_line_names_is_the_one_that_codes(tmp_path: Path) -> None:
    np.save(tmp_path / "book.npy", normal(256, 8))
    (spec,) = parse_method(f"a2ats:codebook={tmp_path / 'book.npy'}")
    codec = kv.get_method(spec.name, **spec.options).bind(LAYER)
    held = quantiser(codec).book.codebook
    np.testing.assert_array_equal(np.array(held)[0, 0], normal(256, 8).astype(np.float16))
    with pytest.raises(kv.ConfigError, match="codebook"):
        parse_method(f"a2ats:codebook={tmp_path / 'missing.npy'}")
