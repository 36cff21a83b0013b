from __future__ import annotations

import copy
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.codec import KVCodec, Pipeline
from kvcompress.errors import ConfigError
from kvcompress.fit.kmeans import kmeans
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages import vq_coder
from kvcompress.stages.base import CarefulCoder, Coder
from kvcompress.stages.commuting_vq import CommutingVQ
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.residual_vq import ResidualVQ
from kvcompress.stages.rope import PostRope, PreRope, RopePolicy
from kvcompress.stages.tables import TableQuantiser
from kvcompress.stages.transform import Identity
from kvcompress.stages.vq_coder import VQCoder
from kvcompress.stages.windowed import WindowedRope
from tests.stages.vq_cases import HEADS, MAKE, commuting, normal, places_round_alike, product, rows

KINDS = sorted(MAKE)


@given(
    st.sampled_from(KINDS),
    st.integers(1, 9),
    st.sampled_from([8, 12, 48]),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([1, 2, 40]),
    st.sampled_from([1, 3, 17]),
    st.integers(0, 999),
)
def test_the_law_of_coders(
    kind: str, bits: int, dim: int, gain: bool, batch: int, tokens: int, queries: int, seed: int
) -> None:
    coder = VQCoder(MAKE[kind](dim, bits), HEADS, gain=gain)
    assert isinstance(coder, Coder)
    z = rows(dim, tokens, seed, batch) * (3 if gain else 1)
    fields = coder.encode(z)
    assert set(fields) == {f.name for f in coder.fields}
    for f in coder.fields:
        assert fields[f.name].shape == (batch, f.heads, tokens, f.width)
        assert fields[f.name].dtype == getattr(mx, f.dtype)
        assert f.payload_bits <= 8 * f.width * fields[f.name].itemsize
    assert coder.table_bytes == coder.quantiser.table_bytes

    decoded = coder.decode(fields)
    assert decoded.shape == z.shape
    assert decoded.dtype == mx.float32
    q = rows(dim, queries, seed + 1, batch)
    p = mx.softmax(rows(tokens, queries, seed + 2, batch), axis=-1)
    expected = q @ decoded.swapaxes(-1, -2)
    atol = 1e-5 * float(mx.sqrt(mx.square(decoded).sum(-1).max()).item()) * dim**0.5
    for pays in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vq_coder, "tables_pay", lambda *_, pays=pays, **__: pays)
            np.testing.assert_allclose(coder.scores(q, fields), expected, atol=atol)
    np.testing.assert_allclose(coder.mix(p, fields), p @ decoded, atol=atol)


@given(
    st.sampled_from(KINDS),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([1, 3]),
    st.integers(1, 5),
)
def test_a_token_is_scored_by_the_queries_of_its_band(
    kind: str, bits: int, gain: bool, batch: int, queries: int, bands: int
) -> None:
    coder = VQCoder(MAKE[kind](12, bits), HEADS, gain=gain)
    fields = coder.encode(rows(12, 40, 1, batch))
    q = mx.stack([rows(12, queries, 2 + place, batch) for place in range(bands)], axis=2)
    band = mx.sort(mx.random.randint(0, bands, (40,), key=mx.random.key(3))).astype(mx.uint32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vq_coder, "tables_pay", lambda *_, **__: False)
        assert coder.band_scores(q, fields, band) is None
        apart = mx.stack([coder.scores(q[:, :, place], fields) for place in range(bands)], axis=-1)
        patch.setattr(vq_coder, "tables_pay", lambda *_, **__: True)
        got = coder.band_scores(q, fields, band)
    assert got is not None
    expected = mx.take_along_axis(apart, band[:, None][None, None, None], axis=-1).squeeze(-1)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def twins(table: mx.array, axis: int) -> np.ndarray:
    """A table whose every second entry is the next float to the one before it.

    Which of two twins is nearer is then up to the round-off of the distance.
    """
    first = np.moveaxis(np.array(table), axis, 0)[::2]
    pairs = np.stack([first, np.nextafter(first, np.float32(9))], axis=1)
    return np.moveaxis(pairs.reshape(-1, *first.shape[1:]), 0, axis)


def near_ties() -> dict[str, TableQuantiser]:
    books = [product(48, 6, 8, seed=seed).codebook for seed in range(2)]
    free = commuting(48, 6, stages=2)
    return {
        "product": ProductVQ(twins(books[0], 2)),
        "product, one book for all": ProductVQ(twins(books[0][:1, :1], 2), 48),
        "metric": ProductVQ(twins(books[0], 2), metric=np.eye(8, dtype=np.float32)[None, None] + 1),
        "residual": ResidualVQ.of([mx.array(twins(book, 2)) for book in books]),
        "commuting": CommutingVQ(twins(free.turning, 2), free.rotary),
    }


@pytest.mark.parametrize("kind", sorted(near_ties()))
@pytest.mark.parametrize("gain", [False, True])
def test_tokens_are_coded_alone(kind: str, gain: bool) -> None:
    """Bit for bit, but where the BLAS rounds a row by its place: there near ties go either way."""
    coder = VQCoder(near_ties()[kind], HEADS, gain=gain)
    z = rows(48, 700, 4)
    whole = coder.encode(z)
    for step, upto in ((1, 20), (7, 140), (64, 192), (333, 700)):
        parts = [coder.encode(z[:, :, i : min(i + step, upto)]) for i in range(0, upto, step)]
        joined = {name: mx.concatenate([part[name] for part in parts], axis=2) for name in whole}
        start = {name: array[:, :, :upto] for name, array in whole.items()}
        if places_round_alike():
            assert all(mx.array_equal(start[name], joined[name]) for name in whole), step
        assert mx.abs(coder.decode(start) - coder.decode(joined)).max() < 1e-3
    both = coder.encode(mx.concatenate([z[:, :, :50], z[:, :, 50:100]], axis=0))
    second, wanted = (
        {name: array[row, :, start : start + 50][None] for name, array in codes.items()}
        for codes, row, start in ((both, 1, 0), (whole, 0, 50))
    )
    if places_round_alike():
        assert all(mx.array_equal(second[name], wanted[name]) for name in whole)
    assert mx.abs(coder.decode(second) - coder.decode(wanted)).max() < 1e-3


@pytest.mark.parametrize("kind", [k for k in KINDS if "one book for all" not in k])
def test_without_a_gain_heads_are_coded_alone(kind: str) -> None:
    coder = VQCoder(MAKE[kind](16, 5), HEADS)
    z = rows(16, 9)
    changed = mx.concatenate([z[:, :1], -z[:, 1:]], axis=1)
    first, second = (coder.encode(x)["codes"] for x in (z, changed))
    assert mx.array_equal(first[:, 0], second[:, 0])
    assert not mx.array_equal(first[:, 1], second[:, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", [PostRope(), PreRope(), WindowedRope(first=1, growth=1.0)])
def test_a_codec_scores_with_the_codes_as_with_decoded_keys(kind: str, rope: RopePolicy) -> None:
    layer = LayerSpec(
        kv_heads=HEADS, query_heads=3 * HEADS, head_dim=16, dtype="float32", rotary=Rotary(16)
    )
    pipeline = Pipeline(Identity(16), VQCoder(MAKE[kind](16, 5), HEADS, gain=True))
    codec = KVCodec(layer, pipeline, pipeline, rope)
    x, places = rows(16, 40), range(100, 140)
    codes = codec.encode(x, x, places)
    assert codes.nbytes == 40 * codec.schema.bytes_per_token
    raw, positions = rows(16, 6, 1), range(140, 142)
    scores = codec.scores(codec.queries(raw, positions), codes, places)
    keys, values = codec.decode(codes, places)
    np.testing.assert_allclose(scores, raw @ keys.swapaxes(-1, -2), atol=2e-3)
    weights = mx.softmax(scores, axis=-1)
    np.testing.assert_allclose(codec.mix(weights, codes), weights @ values, atol=1e-4)


def test_stored_bits() -> None:
    for bits, dtype, width in ((8, "uint8", 6), (4, "uint32", 1), (12, "uint32", 3)):
        (codes,) = VQCoder(product(24, bits), HEADS).fields
        assert (codes.dtype, codes.width, codes.heads) == (dtype, width, HEADS)
        assert codes.payload_bits == 6 * bits


def test_one_gain_serves_all_heads() -> None:
    coder = VQCoder(product(16, 6), HEADS, gain=True)
    z = rows(16, 30)
    fields = coder.encode(z)
    rms = np.sqrt(np.square(np.array(z)).mean((1, 3)))
    got = np.array((fields["gain"].astype(mx.uint32) << 15).view(mx.float32))
    np.testing.assert_allclose(got[:, 0, :, 0], rms, rtol=2**-8)
    # Twice as long, the same codes; heads share the gain, so one alone changes the other's.
    twice = coder.encode(z * 2)
    assert mx.array_equal(twice["codes"], fields["codes"])
    np.testing.assert_allclose(coder.decode(twice), 2 * coder.decode(fields), rtol=1e-6)
    grown = coder.encode(mx.concatenate([z[:, :1], 5 * z[:, 1:]], axis=1))
    assert not mx.array_equal(grown["codes"][:, 0], fields["codes"][:, 0])


def test_a_gain_pays_where_lengths_differ() -> None:
    lengths = np.exp(normal(1, 1, 3000, 1))
    x = normal(1, HEADS, 3000, 8) * lengths
    train, test = x[:, :, :2000], mx.array(x[:, :, 2000:])

    def error(gain: bool) -> float:
        seen = train / np.sqrt(np.square(train).mean((1, 3), keepdims=True)) if gain else train
        book = kmeans(seen[0].reshape(HEADS, 2000, 2, 4).swapaxes(1, 2), 64, seed=0).centroids
        coder = VQCoder(ProductVQ(book), HEADS, gain=gain)
        return float((mx.square(coder.decode(coder.encode(test)) - test)).mean().item())

    assert error(True) < 0.8 * error(False)


def weighed(dim: int, gain: bool = False) -> VQCoder:
    """A coder that assigns by a metric with care, and without it plainly."""
    root = normal(HEADS, dim // 4, 4, 4, seed=3)
    metric = root @ root.swapaxes(-1, -2) + 0.1 * np.eye(4, dtype=np.float32)
    careful = ProductVQ(product(dim, 5).codebook, metric=metric)
    return VQCoder(careful, HEADS, gain=gain, plain=careful.plain())


@pytest.mark.parametrize("gain", [False, True])
def test_marked_tokens_are_assigned_with_care_and_others_plainly(gain: bool) -> None:
    coder = weighed(16, gain)
    assert isinstance(coder, CarefulCoder)
    assert coder.assignments == 2
    assert coder.plain is not None
    z = rows(16, 40, batch=2)
    careful = VQCoder(coder.quantiser, HEADS, gain=gain).encode(z)
    plain = VQCoder(coder.plain, HEADS, gain=gain).encode(z)
    assert not mx.array_equal(careful["codes"], plain["codes"])
    marks = mx.array(np.random.default_rng(0).random((2, 40)) > 0.6)
    mixed = coder.encode(z, marks)
    for name, array in mixed.items():
        assert mx.array_equal(coder.encode(z)[name], careful[name])
        assert mx.array_equal(coder.encode(z, False)[name], plain[name])
        wanted = mx.where(marks[:, None, :, None], careful[name], plain[name])
        assert array.dtype == wanted.dtype
        assert mx.array_equal(array, wanted)
        for start in range(0, 40, 13):
            part = slice(start, start + 13)
            assert mx.array_equal(
                coder.encode(z[:, :, part], marks[:, part])[name], array[:, :, part]
            )


@pytest.mark.parametrize("gain", [False, True])
def test_care_makes_the_scores_error_less(gain: bool) -> None:
    coder = weighed(16, gain)
    assert isinstance(coder.quantiser, ProductVQ)
    z = rows(16, 500)
    careful, plain = (
        float(coder.quantiser.energy(coder.decode(coder.encode(z, care)) - z).mean())
        for care in (True, False)
    )
    assert careful < 0.9 * plain


def test_importance_is_the_energy_over_all_heads() -> None:
    coder = weighed(16)
    assert isinstance(coder.quantiser, ProductVQ)
    z = rows(16, 50, batch=2)
    cut = np.array(z).astype(np.float64).reshape(2, HEADS, 50, 4, 4)
    metric = np.array(coder.quantiser.metric).astype(np.float64)
    wanted = np.einsum("bhtna,hnac,bhtnc->bt", cut, metric, cut)
    np.testing.assert_allclose(coder.importance(z), wanted, rtol=1e-5)
    parts = [coder.importance(z[:, :, i : i + 7]) for i in range(0, 50, 7)]
    assert mx.array_equal(coder.importance(z), mx.concatenate(parts, axis=1))
    for kind in KINDS:
        other = VQCoder(MAKE[kind](16, 5), HEADS).importance(z)
        np.testing.assert_allclose(other, np.square(np.array(z)).sum((1, 3)), rtol=1e-5)


def test_the_plain_assignment_shares_the_codebook_and_must_fit_it() -> None:
    coder = weighed(16)
    assert coder.plain is not None
    assert coder.plain.codebook is coder.quantiser.codebook  # type: ignore[attr-defined]
    assert coder.table_bytes == coder.quantiser.table_bytes
    turned = VQCoder(coder.plain, HEADS, plain=coder.quantiser)  # a metric of what is less careful
    assert turned.table_bytes == coder.table_bytes
    assert VQCoder(coder.quantiser, HEADS).assignments == 1
    with pytest.raises(
        ConfigError, match=r"plain must be of the quantiser's .* \(got \(6, 4, 16\)"
    ):
        VQCoder(coder.quantiser, HEADS, plain=product(16, 6))


def hostile(dim: int) -> dict[str, np.ndarray]:
    noise = normal(1, HEADS, 6, dim)
    huge, one_hot = noise.copy(), np.zeros_like(noise)
    huge[..., 1] = 3e4
    one_hot[..., 2] = 1
    return {
        "zeros": np.zeros_like(noise),
        "constant": np.full_like(noise, 3000),
        "huge channel": huge,
        "one-hot": one_hot,
        "largest float16": np.sign(noise) * 65504,
        "1e30": noise * np.float32(1e30),
        "1e-30": noise * np.float32(1e-30),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("case", sorted(hostile(8)))
def test_hostile_rows_stay_finite(kind: str, gain: bool, case: str) -> None:
    coder = VQCoder(MAKE[kind](16, 6), HEADS, gain=gain)
    x = hostile(16)[case]
    decoded = np.array(coder.decode(coder.encode(mx.array(x))), dtype=np.float64)
    assert np.isfinite(decoded).all()
    if gain and case == "zeros":
        assert not decoded.any()
    if gain and case not in ("one-hot", "huge channel"):
        # The nearest of random entries is no farther than the row is long.
        assert (np.square(decoded - x).sum(-1) <= 1.5 * np.square(x.astype(float)).sum(-1)).all()


@pytest.mark.parametrize("gain", [False, True])
def test_more_bits_mean_less_error(gain: bool) -> None:
    points = normal(3000, 4)
    errors = []
    for bits in (2, 4, 6, 8):
        book = kmeans(points, 2**bits, seed=0, rounds=8).centroids[None, None]
        coder = VQCoder(ProductVQ(book, 16), HEADS, gain=gain)
        z = rows(16, 300, 2)
        errors.append(mx.square(coder.decode(coder.encode(z)) - z).mean().item())
    assert all(b < a for a, b in pairwise(errors)), errors


@pytest.mark.parametrize("kind", KINDS)
def test_coders_can_be_copied_and_share_nothing_lazy(kind: str) -> None:
    coder = VQCoder(MAKE[kind](16, 4), HEADS, gain=True)
    z = rows(16, 4, 3)
    fields, again = coder.encode(z), copy.deepcopy(coder).encode(z)
    assert all(mx.array_equal(fields[name], again[name]) for name in fields)
