from __future__ import annotations

import numpy as np
import pytest

from kvcompress.errors import ConfigError
from kvcompress.fit.kmeans import kmeans, nearest
from kvcompress.fit.residual import fit_residual


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_every_stage_lowers_the_error_it_reports() -> None:
    points = gaussian(2, 1000, 4)
    fit = fit_residual(points, 16, 3, seed=0)
    assert fit.codebooks.shape == (3, 2, 16, 4)
    assert fit.error.shape == (4, 2)
    residual = points.astype(np.float64)
    for stage, book in enumerate(fit.codebooks):
        expected = np.square(residual).sum(-1).mean(-1)
        np.testing.assert_allclose(fit.error[stage], expected, rtol=1e-9)
        residual -= np.take_along_axis(book, nearest(residual, book)[..., None], axis=-2)
    np.testing.assert_allclose(fit.error[-1], np.square(residual).sum(-1).mean(-1), rtol=1e-9)
    assert (np.diff(fit.error, axis=0) < 0).all()


def test_the_first_stage_is_plain_and_later_ones_hold_a_zero() -> None:
    points = gaussian(600, 4)
    fit = fit_residual(points, 16, 2, seed=4, rounds=5)
    np.testing.assert_array_equal(
        fit.codebooks[0], kmeans(points.astype(np.float64), 16, seed=4, rounds=5).centroids
    )
    assert not fit.codebooks[1, 0].any()
    assert fit.codebooks[1, 1:].any(axis=-1).all()


def test_no_point_is_worse_off_for_a_later_stage() -> None:
    # Points that the first stage meets exactly must not be moved by the second.
    points = np.concatenate([np.tile(gaussian(3, 4), (50, 1)), gaussian(20, 4, seed=1) * 5])
    first, *later = fit_residual(points, 8, 3, seed=0).codebooks
    residual = points - first[nearest(points, first)]
    for book in later:
        after = residual - book[nearest(residual, book)]
        assert (np.square(after).sum(-1) <= np.square(residual).sum(-1) * (1 + 1e-6)).all()
        residual = after


@pytest.mark.parametrize(("clusters", "stages"), [(1, 2), (4, 0)])
def test_illegal_numbers_are_refused(clusters: int, stages: int) -> None:
    with pytest.raises(ConfigError, match=rf"\(got {stages}, {clusters}\)"):
        fit_residual(np.ones((4, 2)), clusters, stages, seed=0)
