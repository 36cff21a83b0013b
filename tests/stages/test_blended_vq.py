from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.stages.blended_vq import BlendedVQ
from kvcompress.stages.product_vq import ProductVQ
from tests.stages.vq_cases import cut, product, rows


def losses(x: mx.array, book: ProductVQ, beta: float) -> np.ndarray:
    """What every entry would cost, by brute force: ``(B, H, T, n, K)``."""
    entries = np.array(book.codebook).astype(np.float64)[None, :, None]
    vectors = cut(x, book.sub_dim)[..., None, :].astype(np.float64)
    plain = np.square(vectors - entries).sum(-1)
    lengths = np.linalg.norm(vectors, axis=-1), np.linalg.norm(entries, axis=-1)
    cosine = (vectors * entries).sum(-1) / np.maximum(lengths[0] * lengths[1], 1e-300)
    return np.asarray((1 - beta) * plain + beta * lengths[0] ** 2 * (1 - cosine))


@given(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.sampled_from([2, 4, 8]), st.integers(0, 99))
def test_the_entry_of_least_blended_error_is_chosen(beta: float, size: int, seed: int) -> None:
    book = product(16, 5, size, seed=seed)
    x = rows(16, 40, seed)
    loss = losses(x, book, beta)
    codes = np.array(BlendedVQ(book, beta).encode(x)).astype(np.int64)[..., None]
    chosen = np.take_along_axis(loss, codes, axis=-1)[..., 0]
    np.testing.assert_allclose(chosen, loss.min(-1), rtol=1e-3, atol=1e-4)


def test_without_the_direction_it_is_the_plain_quantiser() -> None:
    book, x = product(16, 6), rows(16, 300)
    assert mx.mean(BlendedVQ(book, 0.0).encode(x) == book.encode(x)).item() > 0.999


def test_the_direction_alone_is_blind_to_length() -> None:
    book, x = product(16, 6), rows(16, 60)
    stage = BlendedVQ(book, 1.0)
    assert mx.array_equal(stage.encode(x), stage.encode(4.0 * x))


def test_vectors_and_entries_of_no_length_are_taken() -> None:
    entries = np.zeros((1, 1, 4, 4), np.float32)
    entries[0, 0, 1:] = np.eye(4)[:3]
    for beta in (0.0, 0.5, 1.0):
        stage = BlendedVQ(ProductVQ(entries, 8), beta)
        assert stage.encode(mx.zeros((1, 2, 3, 8))).tolist() == [[[[0, 0]] * 3] * 2]


@pytest.mark.parametrize("step", [1, 7, 32])
def test_tokens_are_coded_alone(step: int) -> None:
    stage, x = BlendedVQ(product(16, 6), 0.5), rows(16, 90)
    parts = [stage.encode(x[:, :, i : i + step]) for i in range(0, 90, step)]
    assert mx.array_equal(mx.concatenate(parts, axis=2), stage.encode(x))


def test_it_decodes_as_its_book() -> None:
    book, x = product(16, 6), rows(16, 9)
    stage = BlendedVQ(book)
    codes = stage.encode(x)
    assert mx.array_equal(stage.decode(codes), book.decode(codes))
    assert mx.array_equal(stage.tables(x), book.tables(x))
    sizes = (stage.bits, stage.dim, stage.sub_dim, stage.codes, stage.table_bytes)
    assert sizes == (book.bits, book.dim, book.sub_dim, book.codes, book.table_bytes)


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_a_weight_out_of_range_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match=r"BlendedVQ: beta must be from 0 to 1 \(got"):
        BlendedVQ(product(16, 4), beta)
