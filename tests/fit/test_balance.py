from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.fit.balance import balanced_rotation
from kvcompress.fit.kmeans import kmeans, nearest


def covariance(dim: int, seed: int, heads: int = 2) -> np.ndarray:
    drawn = np.random.default_rng(seed)
    x = drawn.standard_normal((heads, 8 * dim, dim)) * np.geomspace(1, 0.05, dim)
    mixed = x @ np.linalg.qr(drawn.standard_normal((dim, dim)))[0]
    return np.asarray(mixed.swapaxes(1, 2) @ mixed / (8 * dim))


@given(st.sampled_from([(8, 2), (16, 4), (64, 8), (12, 12), (6, 1)]), st.integers(0, 50))
def test_it_is_a_rotation_after_which_channels_are_independent(
    shape: tuple[int, int], seed: int
) -> None:
    dim, size = shape
    C = covariance(dim, seed)
    R = balanced_rotation(C, size)
    np.testing.assert_allclose(
        R.swapaxes(1, 2) @ R, np.broadcast_to(np.eye(dim), R.shape), atol=1e-9
    )
    after = R.swapaxes(1, 2) @ C @ R
    diagonal = np.einsum("hii->hi", after)
    np.testing.assert_allclose(after, np.eye(dim) * diagonal[:, None], atol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_sub_vectors_have_nearly_equal_products_of_variances(scale: float) -> None:
    C = covariance(64, 1) * scale
    R = balanced_rotation(C, 8)
    variances = np.einsum("hii->hi", R.swapaxes(1, 2) @ C @ R).reshape(2, 8, 8)
    products = np.log(variances).sum(-1)
    sorted_products = np.log(np.sort(variances.reshape(2, 64)).reshape(2, 8, 8)).sum(-1)
    assert np.ptp(products) < 0.1 * np.ptp(sorted_products)


def test_a_product_code_errs_less_after_it() -> None:
    drawn = np.random.default_rng(0)
    x = drawn.standard_normal((4000, 16)) * np.geomspace(2, 0.05, 16)
    x = x @ np.linalg.qr(drawn.standard_normal((16, 16)))[0]

    def error(rows: np.ndarray) -> float:
        cut = rows.reshape(-1, 4, 4).swapaxes(0, 1)
        books = kmeans(cut, 16, seed=0).centroids
        labels = nearest(cut, books)[..., None]
        return float(np.square(cut - np.take_along_axis(books, labels, axis=1)).sum(-1).mean())

    R = balanced_rotation((x.T @ x / len(x))[None], 4)[0]
    assert error(x @ R) < 0.8 * error(x)


def test_directions_without_variance_are_dealt_like_others() -> None:
    R = balanced_rotation(np.diag([1.0, 0, 0, 0, 0, 0])[None], 2)
    np.testing.assert_allclose(R[0].T @ R[0], np.eye(6), atol=1e-12)
    assert np.isfinite(balanced_rotation(np.zeros((1, 4, 4)), 2)).all()


@pytest.mark.parametrize(
    ("bad", "size", "message"),
    [
        (np.eye(4), 2, "must be"),
        (np.ones((1, 4, 3)), 2, "must be"),
        (np.eye(4)[None], 3, "not divisible by 3"),
        (np.full((1, 4, 4), np.nan), 2, "finite"),
    ],
)
def test_what_is_no_covariance_is_refused(bad: np.ndarray, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"balanced_rotation: .*{message}"):
        balanced_rotation(bad, size)
