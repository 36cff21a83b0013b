"""Product quantisation and k-means held against faiss."""

from __future__ import annotations

import faiss
import mlx.core as mx
import numpy as np
import pytest

from kvcompress.fit.kmeans import kmeans
from kvcompress.stages.product_vq import ProductVQ


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    faiss.omp_set_num_threads(1)


def points(count: int, dim: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed)
    mixed = drawn.standard_normal((count, dim)) @ drawn.standard_normal((dim, dim))
    return np.asarray(mixed, dtype=np.float32)


@pytest.mark.parametrize(("dim", "size", "bits"), [(64, 8, 8), (64, 4, 8), (32, 8, 4), (48, 16, 6)])
def test_faiss_chooses_the_same_codes(dim: int, size: int, bits: int) -> None:
    train, x = points(3000, dim, 0), points(200, dim, 1)
    theirs = faiss.ProductQuantizer(dim, dim // size, bits)
    theirs.train(train)
    books = faiss.vector_to_array(theirs.centroids).reshape(1, dim // size, 1 << bits, size)
    ours = ProductVQ(books)

    packed = theirs.compute_codes(x)
    decoded = theirs.decode(packed)
    codes = ours.encode(mx.array(x)[None, None])
    found = np.array(ours.decode(codes))[0, 0]
    same = np.isclose(found, decoded).all(axis=-1)
    assert same.mean() > 0.99  # near ties may fall either way
    errors = [float(np.square(x - y).sum(-1).mean()) for y in (found, decoded)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-5)
    if bits == 8:  # a code is a byte in both
        np.testing.assert_array_equal(np.array(codes)[0, 0][same], packed[same])


@pytest.mark.parametrize("size", [4, 8])
def test_faiss_fits_no_better_codebooks(size: int) -> None:
    x = points(6000, size, 2)
    theirs = faiss.Kmeans(size, 64, niter=25, seed=1, max_points_per_centroid=1000)
    theirs.train(x)
    distances, _ = theirs.index.search(x, 1)
    ours = kmeans(x[None], 64, seed=1).objective[-1, 0]
    assert ours < 1.03 * float(distances.mean())
