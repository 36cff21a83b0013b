from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.codec import Codes, KVCodec, Pipeline
from kvcompress.errors import ConfigError
from kvcompress.stages.centre import fixed_centre
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.rope import PostRope, PreRope, RopePolicy
from kvcompress.stages.transform import ChannelScale
from kvcompress.stages.vq_coder import VQCoder
from tests.stand_ins import LAYER, Rounded, Same, StandIn, largest, tokens

ROPES = st.sampled_from([PostRope(), PreRope()])


def calibrated(rope: RopePolicy) -> KVCodec:
    rng = np.random.default_rng(3)
    return KVCodec(
        LAYER,
        Pipeline(Same(32), Rounded(32, 2), fixed_centre(rng.normal(size=(2, 32)))),
        Pipeline(Same(16), Rounded(16, 2), fixed_centre(rng.normal(size=(2, 16)))),
        rope,
    )


@given(rope=ROPES, start=st.integers(0, 50_000), kind=st.sampled_from(["none", "first", "fixed"]))
def test_decode_gives_back_the_tokens_in_the_models_frame(
    rope: RopePolicy, start: int, kind: str
) -> None:
    codec = (
        calibrated(rope)
        if kind == "fixed"
        else StandIn(rope=rope, warmup=6 if kind == "first" else 0).bind(LAYER)
    )
    _, k, v = tokens(11)
    codes = codec.encode(k, v, range(start, start + 11))
    assert codes.tokens == 11
    assert sorted(codes.fields) == [f.name for f in codec.schema.fields]
    keys, values = codec.decode(codes, range(start, start + 11))
    assert largest(keys - k) < 2e-5
    assert largest(values - v) < 2e-5


@given(rope=ROPES, start=st.integers(0, 50_000), kind=st.sampled_from(["none", "fixed"]))
def test_scores_and_mix_are_those_of_the_decoded(rope: RopePolicy, start: int, kind: str) -> None:
    codec = calibrated(rope) if kind == "fixed" else StandIn(rope=rope).bind(LAYER)
    q, k, v = tokens(9)
    places = range(start, start + 9)
    codes = codec.encode(k, v, places)
    rows = q.reshape(1, 2, 27, 32)
    scores = codec.scores(codec.queries(rows, range(start + 20, start + 29)), codes, places)
    assert largest(scores - rows @ k.swapaxes(-1, -2)) < 2e-4
    weights = mx.softmax(scores, axis=-1)
    out = codec.outputs(codec.mix(weights, codes), weights.sum(-1, keepdims=True), codes.constants)
    assert largest(out - weights @ v) < 1e-4


def test_the_first_tokens_mean_is_frozen() -> None:
    codec = StandIn(warmup=6).bind(LAYER)
    _, k, v = tokens(30)
    whole = codec.encode(k, v, range(4, 34))
    constants = codec.begin(k[:, :, :6], v[:, :, :6], range(4, 10))
    assert codec.warmup == 6
    rest = codec.encode(k[:, :, 20:], v[:, :, 20:], range(24, 34), constants)
    for name, array in rest.fields.items():
        assert mx.array_equal(array, whole.fields[name][:, :, 20:])
    plain = LAYER.rotary.unrotate(k, range(4, 34)) if LAYER.rotary else k
    np.testing.assert_allclose(
        np.array(constants["k.mean"]), np.array(plain)[:, :, :6].mean(2, keepdims=True), atol=1e-6
    )


def marks(codes: Codes) -> list[int]:
    return np.array(codes.fields["k.mark"])[0, 0, :, 0].tolist()


def test_marks_reach_the_key_coder() -> None:
    _, k, v = tokens(9)
    some = mx.arange(9)[None] % 3 == 0
    codec = StandIn(marked=True, careful_fraction=0.3).bind(LAYER)
    assert codec.chooses
    assert marks(codec.encode(k, v, range(9))) == [1] * 9
    assert marks(codec.encode(k, v, range(9), careful=some)) == [1, 0, 0] * 3
    none = StandIn(marked=True, careful_fraction=0.0).bind(LAYER)
    assert not none.chooses
    assert marks(none.encode(k, v, range(9))) == [0] * 9
    one = StandIn(careful_fraction=0.3).bind(LAYER)
    assert not one.chooses
    assert one.encode(k, v, range(9), careful=some).tokens == 9
    assert (codec.schema.exact_bytes, none.schema.exact_bytes, one.schema.exact_bytes) == (4, 0, 0)


@given(rope=ROPES)
def test_importance_is_that_of_the_centred_key_in_the_codes_frame(rope: RopePolicy) -> None:
    codec = StandIn(marked=True, careful_fraction=0.5, warmup=6, rope=rope).bind(LAYER)
    _, k, v = tokens(30)
    constants = codec.begin(k, v, range(30))
    got = codec.importance(k[:, :, 10:], range(10, 30), constants)
    plain = LAYER.rotary.unrotate(k, range(30)) if LAYER.rotary else k
    centred = np.array(plain)[:, :, 10:] - np.array(constants["k.mean"])
    np.testing.assert_allclose(got, np.square(centred).sum((1, 3)), rtol=1e-4)
    with pytest.raises(ConfigError, match="two assignments"):
        StandIn().bind(LAYER).importance(k, range(30), {})


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_fractions_of_care_are_from_0_to_1(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"careful_fraction must be from 0 to 1 \(got"):
        StandIn(careful_fraction=fraction).bind(LAYER)


def test_decoding_saturates_rather_than_overflows() -> None:
    layer = evolve(LAYER, dtype="float16")
    codec = StandIn().bind(layer)
    k, v = mx.full((1, 2, 3, 32), 65504.0), mx.full((1, 2, 3, 16), -65504.0)
    codes = codec.encode(k * 1.01, v * 1.01, range(3))
    for array in codec.decode(codes, range(3)):
        assert array.dtype == mx.float16
        assert np.isfinite(np.array(array)).all()


def test_stages_that_do_not_fit_the_layer_are_refused() -> None:
    pipeline = Pipeline(Same(31), Rounded(31, 2))
    with pytest.raises(ConfigError, match="keys' transform must take 32 channels"):
        KVCodec(LAYER, pipeline, Pipeline(Same(16), Rounded(16, 2)))


def test_no_tokens_are_coded_to_none() -> None:
    codec = StandIn(warmup=6).bind(LAYER)
    _, k, v = tokens(11)
    constants = codec.begin(k, v, range(11))
    for begun in (constants, None):
        codes = codec.encode(k[:, :, :0], v[:, :, :0], range(0), begun)
        assert codes.tokens == 0
        keys, values = codec.decode(codes, range(0))
        assert (keys.shape, values.shape) == ((1, 2, 0, 32), (1, 2, 0, 16))


@pytest.mark.parametrize("part", ["keys", "values"])
def test_tables_for_another_number_of_heads_are_refused(part: str) -> None:
    dim = 32 if part == "keys" else 16
    books = ProductVQ(mx.zeros((3, dim // 4, 16, 4), mx.float16), dim)
    wrong = {
        "codebook": Pipeline(Same(dim), VQCoder(books, 2)),
        "scale": Pipeline(ChannelScale(np.ones((3, dim), np.float32)), Rounded(dim, 2)),
        "mean": Pipeline(Same(dim), Rounded(dim, 2), fixed_centre(np.zeros((3, dim)))),
    }
    sound = StandIn().bind(LAYER)
    for pipeline in wrong.values():
        with pytest.raises(ConfigError, match=f"the {part} of layer 0 must take 2 heads of {dim}"):
            evolve(sound, **{part: pipeline})
