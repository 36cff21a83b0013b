from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.fit.lloyd_max import Levels, lloyd_max, tree, uniform
from kvcompress.fit.sphere import SphereMarginal

DIMS = (2, 3, 4, 8, 63, 64, 96, 128, 256, 576)

# Mean squared error by channels and bits, measured on samples by other means.
DISTORTION = {
    64: (0.3584, 0.1145, 0.0334, 0.00913),
    96: (0.3601, 0.1155, 0.0338, 0.00925),
    128: (0.3609, 0.1160, 0.0340, 0.00931),
    256: (0.3621, 0.1167, 0.0343, 0.00941),
}
GAUSSIAN = (0.36338, 0.11748, 0.03455, 0.00950, 0.00251, 0.00064)


def on_the_sphere(dim: int, rows: int) -> np.ndarray:
    rows_of = np.random.default_rng(dim).standard_normal((rows, dim))
    return rows_of * np.sqrt(dim) / np.linalg.norm(rows_of, axis=1, keepdims=True)


def error_of(levels: Levels, x: np.ndarray) -> float:
    return float(np.mean((levels.levels[np.searchsorted(levels.thresholds, x)] - x) ** 2))


@pytest.mark.parametrize("dim", DISTORTION)
def test_distortion_is_that_of_the_table(dim: int) -> None:
    for bits, expected in enumerate(DISTORTION[dim], start=1):
        assert lloyd_max(dim, bits).distortion == pytest.approx(expected, rel=0.004)


def test_many_channels_come_near_the_gaussian() -> None:
    for bits, expected in enumerate(GAUSSIAN, start=1):
        assert lloyd_max(4096, bits).distortion == pytest.approx(expected, rel=0.01)
    positive = [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326]
    np.testing.assert_allclose(lloyd_max(4096, 4).levels[8:], positive, rtol=1e-3)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_levels_are_a_fixed_point(dim: int, bits: int) -> None:
    book = lloyd_max(dim, bits)
    levels, law = book.levels, SphereMarginal(dim)
    assert len(levels) == 2**bits
    assert (np.diff(levels) > 0).all()
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-12)
    np.testing.assert_allclose(book.thresholds, (levels[1:] + levels[:-1]) / 2, atol=1e-12)
    edges = np.concatenate([[-law.radius], book.thresholds, [law.radius]])
    means = np.diff(law.moment(edges)) / np.diff(law.mass(edges))
    np.testing.assert_allclose(levels, means, atol=1e-7)


@pytest.mark.parametrize("make", [lloyd_max, uniform])
@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_distortion_is_what_samples_show(make: object, dim: int) -> None:
    assert callable(make)
    x = on_the_sphere(dim, 40_000)
    for bits in (1, 2, 4):
        book = make(dim, bits)
        assert error_of(book, x) == pytest.approx(book.distortion, rel=0.03)


@given(st.sampled_from(DIMS), st.integers(1, 7))
def test_distortion_falls_with_bits_and_lloyd_max_is_never_worse(dim: int, bits: int) -> None:
    for make in (lloyd_max, uniform):
        assert make(dim, bits + 1).distortion < make(dim, bits).distortion
    assert lloyd_max(dim, bits).distortion <= uniform(dim, bits).distortion + 1e-12


@pytest.mark.parametrize("dim", [2, 64, 128, 576])
@pytest.mark.parametrize("bits", range(1, 9))
def test_no_other_step_is_better(dim: int, bits: int) -> None:
    book, law = uniform(dim, bits), SphereMarginal(dim)
    step = book.levels[1] - book.levels[0]
    np.testing.assert_allclose(np.diff(book.levels), step, rtol=1e-9)

    def error(scale: float) -> float:
        levels = book.levels * scale
        edges = np.concatenate([[-law.radius], (levels[1:] + levels[:-1]) / 2, [law.radius]])
        mass, moment = np.diff(law.mass(edges)), np.diff(law.moment(edges))
        return float(1 + np.sum(levels * (levels * mass - 2 * moment)))

    assert error(1.0) == pytest.approx(book.distortion, rel=1e-6)
    scales = [s for s in np.geomspace(0.5, 2, 81) if s * book.thresholds[-1] < law.radius]
    assert min(map(error, scales)) >= book.distortion * (1 - 1e-6)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("high", "low"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 4)])
def test_tree_embeds_the_coarser_code(dim: int, high: int, low: int) -> None:
    both, outer = tree(dim, high, low), lloyd_max(dim, high)
    assert (np.diff(both.levels) > 0).all()
    np.testing.assert_array_equal(both.thresholds[2**low - 1 :: 2**low], outer.thresholds)
    assert both.distortion < outer.distortion
    single = lloyd_max(dim, high + low).distortion
    assert single * (1 - 1e-9) <= both.distortion <= single * 1.05
    x = on_the_sphere(dim, 20_000)
    assert error_of(both, x) == pytest.approx(both.distortion, rel=0.03)


def test_tree_matches_the_known_splits() -> None:
    # Of the Gaussian: 2 + 1 bits 0.0348, 2 + 2 0.0097, 3 + 1 0.0096.
    assert tree(4096, 2, 1).distortion == pytest.approx(0.0348, rel=0.01)
    assert tree(4096, 2, 2).distortion == pytest.approx(0.0097, rel=0.01)
    assert tree(4096, 3, 1).distortion == pytest.approx(0.0096, rel=0.01)


def test_one_channel_has_no_error() -> None:
    for book in (lloyd_max(1, 3), uniform(1, 2), tree(1, 1, 1)):
        assert book.distortion == 0.0
        assert {-1.0, 1.0} <= set(book.levels.tolist())


def test_three_channels_are_uniform() -> None:
    # On an ordinary sphere a coordinate is uniform (Archimedes), so the best levels are too.
    for bits in (1, 3, 5):
        count = 2**bits
        expected = np.sqrt(3) * (2 * np.arange(count) + 1 - count) / count
        np.testing.assert_allclose(lloyd_max(3, bits).levels, expected, atol=1e-7)
        np.testing.assert_allclose(uniform(3, bits).levels, expected, atol=1e-7)


def test_books_are_shared_and_read_only() -> None:
    assert lloyd_max(64, 4) is lloyd_max(64, 4)
    with pytest.raises(ValueError, match="read-only"):
        lloyd_max(64, 4).levels[0] = 0.0


@pytest.mark.parametrize(("dim", "bits"), [(64, 0), (64, 9), (0, 2), (-1, 2)])
def test_illegal_sizes_are_refused(dim: int, bits: int) -> None:
    for make in (lloyd_max, uniform):
        with pytest.raises(ConfigError, match=r"(bits|dim) must be"):
            make(dim, bits)
    with pytest.raises(ConfigError, match="bits must be"):
        tree(64, 5, 4)
