from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.fit.kmeans import kmeans
from kvcompress.stages.base import Quantiser
from kvcompress.stages.product_vq import ProductVQ
from tests.stages.vq_cases import HEADS, all_distances, cut, normal, product, rows

shapes = st.sampled_from([(HEADS, 0), (HEADS, 1), (1, 0), (1, 1)])


@given(
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 8, 24]),
    shapes,
    st.sampled_from(["float16", "float32"]),
    st.integers(1, 2),
    st.integers(0, 999),
)
def test_codes_are_the_nearest_entries(
    bits: int, size: int, shape: tuple[int, int], dtype: str, batch: int, seed: int
) -> None:
    heads, spaces = shape
    book = mx.array(normal(heads, spaces or 24 // size, 2**bits, size, seed=seed))
    book = book.astype(getattr(mx, dtype))
    vq = ProductVQ(book, 24)
    assert isinstance(vq, Quantiser)
    assert (vq.dim, vq.bits, vq.codes, vq.sub_dim) == (24, bits, 24 // size, size)
    x = rows(24, 7, seed, batch)
    codes = vq.encode(x)
    assert codes.shape == (batch, HEADS, 7, 24 // size)
    assert codes.dtype == (mx.uint8 if bits <= 8 else mx.uint16)
    distances = all_distances(x, book, size)
    chosen = np.take_along_axis(distances, np.array(codes)[..., None].astype(np.int64), -1)[..., 0]
    np.testing.assert_allclose(chosen, distances.min(-1), rtol=1e-4, atol=1e-5)

    # What decodes is the entry that the distance was measured to, bit for bit.
    entries = np.broadcast_to(np.array(book.astype(mx.float32)), (HEADS, 24 // size, 2**bits, size))
    wanted = np.take_along_axis(
        entries[None, :, None], np.array(codes)[..., None, None].astype(np.int64), axis=-2
    )
    decoded = vq.decode(codes)
    assert decoded.dtype == mx.float32
    np.testing.assert_array_equal(cut(decoded, size), wanted[..., 0, :])


@given(st.integers(1, 8), shapes, st.integers(0, 99))
def test_a_codebook_that_holds_the_data_gives_no_error(
    bits: int, shape: tuple[int, int], seed: int
) -> None:
    vq = product(16, bits, 4, shape[0], shape[1])
    codes = mx.array(
        np.random.default_rng(seed).integers(0, 2**bits, (1, HEADS, 9, 4)).astype(np.uint8)
    )
    assert mx.array_equal(vq.encode(vq.decode(codes)), codes)


def test_a_tie_goes_to_the_lower_entry() -> None:
    book = np.array([[[[1.0, 0], [-1, 0], [0, 1], [0, 1]]]])
    x = mx.array([[[[0.0, 0, 0, 3, 1, 1]]]])
    assert ProductVQ(book, 6).encode(x).tolist() == [[[[0, 2, 0]]]]


def test_tables_hold_every_score() -> None:
    vq = product(24, 5, 3)
    q = rows(24, 6, 2, batch=2)
    got = vq.tables(q)
    assert got.shape == (2, HEADS, 8, 6, 32)
    expected = np.einsum("bhmns,hnks->bhnmk", cut(q, 3), np.array(vq.codebook))
    np.testing.assert_allclose(got, expected, atol=1e-5)


@given(st.integers(1, 3), st.integers(2, 7), st.integers(0, 999))
def test_a_metric_weighs_the_error(heads: int, size: int, seed: int) -> None:
    root = normal(HEADS, 3, size, size, seed=seed)
    metric = root @ root.swapaxes(-1, -2) + 0.1 * np.eye(size, dtype=np.float32)
    metric = metric[: 1 if heads == 1 else HEADS]
    book = normal(HEADS, 3, 16, size, seed=seed + 1)
    x = rows(3 * size, 11, seed)
    codes = np.array(ProductVQ(book, metric=metric).encode(x)).astype(np.int64)
    e = cut(x, size)[..., None, :].astype(np.float64) - book[None, :, None]
    full = np.broadcast_to(metric, (HEADS, 3, size, size)).astype(np.float64)
    loss = np.einsum("bhtnki,hnij,bhtnkj->bhtnk", e, full, e)
    chosen = np.take_along_axis(loss, codes[..., None], -1)[..., 0]
    np.testing.assert_allclose(chosen, loss.min(-1), rtol=1e-3, atol=1e-3)


def test_the_identity_as_a_metric_changes_nothing() -> None:
    plain = product(16, 6)
    weighed = ProductVQ(plain.codebook, metric=np.eye(4)[None, None])
    x = rows(16, 200)
    assert mx.array_equal(plain.encode(x), weighed.encode(x))
    assert weighed.table_bytes == plain.table_bytes + 64


@pytest.mark.parametrize("heads", [1, HEADS])
def test_energy_is_the_metrics_and_does_not_depend_on_chunks(heads: int) -> None:
    root = normal(heads, 1, 4, 4)
    metric = root @ root.swapaxes(-1, -2)
    vq = ProductVQ(normal(1, 4, 8, 4), metric=metric)
    x = rows(16, 90)
    full = np.broadcast_to(metric, (HEADS, 4, 4, 4)).astype(np.float64)
    e = cut(x, 4).astype(np.float64)
    np.testing.assert_allclose(
        vq.energy(x), np.einsum("bhtna,hnac,bhtnc->bht", e, full, e), rtol=1e-4
    )
    np.testing.assert_allclose(vq.plain().energy(x), np.square(e).sum((-1, -2)), rtol=1e-5)
    parts = [vq.energy(x[:, :, i : i + 11]) for i in range(0, 90, 11)]
    assert mx.array_equal(vq.energy(x), mx.concatenate(parts, axis=2))


def test_the_plain_quantiser_shares_the_codebook() -> None:
    full = ProductVQ(mx.array(normal(1, 4, 8, 4)), 16, np.eye(4)[None, None])
    plain = full.plain()
    assert plain.metric is None
    assert plain.codebook is full.codebook
    assert (plain.dim, plain.bits) == (16, 3)


def test_many_tokens_are_encoded_in_bounded_memory() -> None:
    vq = product(64, 8, 8)
    x = mx.random.normal((1, HEADS, 8192, 64), key=mx.random.key(0))
    mx.eval(x)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    codes = vq.encode(x)
    mx.eval(codes)
    # All distances at once would take 134 MB.
    assert mx.get_peak_memory() - before < 64 << 20
    few = mx.concatenate([vq.encode(x[:, :, i : i + 7]) for i in range(0, 700, 7)], axis=2)
    assert mx.array_equal(codes[:, :, :700], few)


@pytest.mark.parametrize(
    ("size", "bits", "points", "expected"),
    [
        (16, 8, 16384, 0.581),
        (8, 8, 16384, 0.323),
        (4, 4, 8192, 0.349),
        (2, 4, 8192, 0.108),
        (4, 8, 32768, 0.098),
        (2, 8, 32768, 0.0083),
    ],
)
def test_the_distortion_of_gaussian_vectors(
    size: int, bits: int, points: int, expected: float
) -> None:
    book = kmeans(normal(points, size), 2**bits, seed=0, rounds=12).centroids
    vq = ProductVQ(book[None, None], 4 * size)
    x = rows(4 * size, 2000, 5)
    error = mx.square(vq.decode(vq.encode(x)) - x).mean().item()
    assert error == pytest.approx(expected, rel=0.035)
    assert error > 4.0 ** (-bits / size)  # Shannon's bound


def test_distortion_falls_with_bits() -> None:
    points, x = normal(4000, 4), rows(16, 1000, 1)
    errors = []
    for bits in range(1, 9):
        vq = ProductVQ(kmeans(points, 2**bits, seed=0, rounds=8).centroids[None, None], 16)
        errors.append(mx.square(vq.decode(vq.encode(x)) - x).mean().item())
    assert all(after < before for before, after in pairwise(errors))


def test_half_precision_costs_half_the_bytes_and_hardly_any_error() -> None:
    full = product(32, 8, 4)
    half = ProductVQ(full.codebook.astype(mx.float16))
    assert full.table_bytes == HEADS * 8 * 256 * 4 * 4
    assert half.table_bytes * 2 == full.table_bytes
    x = rows(32, 500)
    errors = [mx.square(vq.decode(vq.encode(x)) - x).mean().item() for vq in (full, half)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


@pytest.mark.parametrize(
    ("book", "options", "message"),
    [
        (np.ones((2, 4, 16)), {}, r"codebook must have 4 axes \(got shape \(2, 4, 16\)\)"),
        (np.ones((2, 4, 12, 4)), {}, r"2, 4, ... or 4096 entries \(got 12\)"),
        (np.ones((2, 4, 1, 4)), {}, r"\(got 1\)"),
        (np.full((1, 1, 2, 4), np.inf), {}, "codebook must be finite"),
        (np.full((1, 1, 2, 4), np.inf, np.float16), {}, "finite in mlx.core.float16"),
        (np.ones((2, 3, 16, 4)), {"dim": 16}, r"must have 1 or 4 sub-spaces \(got 3\)"),
        (np.ones((2, 1, 16, 3)), {"dim": 16}, r"sub-vectors of 3 must have"),
        (
            np.ones((2, 4, 16, 4)),
            {"metric": np.ones((2, 4, 3, 3))},
            r"\(heads or 1, 4 or 1, 4, 4\)",
        ),
        (np.ones((2, 4, 16, 4)), {"metric": np.ones((3, 1, 4, 4))}, r"\(got \(3, 1, 4, 4\)\)"),
    ],
)
def test_books_that_do_not_fit_are_refused(
    book: np.ndarray, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"ProductVQ: .*{message}"):
        ProductVQ(book, **options)  # type: ignore[arg-type]
