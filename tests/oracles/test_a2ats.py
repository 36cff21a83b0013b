"""Equation 14 of A2ATS by enumeration, and windowed RoPE in plain float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import kvcompress as kv
from kvcompress.layers import LayerSpec, Rotary

DIM, SIZE, ENTRIES = 32, 8, 64
LAYER = LayerSpec(kv_heads=2, query_heads=2, head_dim=DIM, dtype="float32", rotary=Rotary(DIM))


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def turned(x: np.ndarray, places: np.ndarray, sign: float = 1.0) -> np.ndarray:
    """Rotate the pairs ``l, l + D/2`` of ``(H, T, D)`` in float64."""
    half = x.shape[-1] // 2
    angle = sign * np.outer(places, 10000.0 ** (-np.arange(half) / half))
    a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1
    )


@pytest.mark.parametrize("seed", range(4))
def test_equation_14_by_enumeration(seed: int) -> None:
    q = normal(2, 300, SIZE, seed=seed) * np.geomspace(2, 0.1, SIZE, dtype=np.float32)
    H = np.einsum("hni,hnj->hij", q, q) / 300
    book = normal(2, ENTRIES, SIZE, seed=seed + 10)
    method = kv.get_method(
        "a2ats", sub_dim=SIZE, codebook_bits=6, codebook=book, query_h=H, rope="exact"
    )
    plain = normal(2, 50, DIM, seed=seed + 20)
    keys = mx.array(turned(plain, np.arange(50)).astype(np.float32))[None]
    codec = method.bind(LAYER)
    codes = codec.encode(keys, keys, range(50))
    found = np.array(codec.keys.coder.quantiser.encode(mx.array(plain)[None]))[0]  # type: ignore[attr-defined]

    entries = book.astype(np.float16).astype(np.float64)
    cut = plain.reshape(2, 50, DIM // SIZE, SIZE).astype(np.float64)
    e = cut[..., None, :] - entries[:, None, None]
    loss = np.einsum("htnki,hij,htnkj->htnk", e, H.astype(np.float64), e)
    chosen = np.take_along_axis(loss, found[..., None].astype(int), axis=-1)[..., 0]
    np.testing.assert_allclose(chosen, loss.min(-1), rtol=2e-3, atol=1e-4)

    # The same choice after z = k L by least squares (Eq. 15 to 17).
    factor = np.linalg.cholesky(H.astype(np.float64))
    z, centroids = cut @ factor[:, None], entries @ factor
    whitened = np.square(z[..., None, :] - centroids[:, None, None]).sum(-1)
    np.testing.assert_allclose(whitened, loss, rtol=1e-9, atol=1e-9)

    decoded, _ = codec.decode(codes, range(50))
    best = np.take_along_axis(
        np.broadcast_to(entries[:, None, None], (*loss.shape, SIZE)),
        loss.argmin(-1)[..., None, None],
        axis=-2,
    )[..., 0, :].reshape(2, 50, DIM)
    agree = np.isclose(np.array(decoded)[0], turned(best, np.arange(50)), atol=1e-2).all(-1)
    assert agree.mean() > 0.98  # near ties may fall either way in float32


@pytest.mark.parametrize("rope", ["single", "banded", "exact"])
def test_scores_of_far_keys_in_plain_numbers(rope: str) -> None:
    book = normal(ENTRIES, SIZE, seed=1)
    method = kv.get_method(
        "a2ats", sub_dim=SIZE, codebook_bits=6, codebook=book, rope=rope, b=300, window=16,
        growth=2.0, use_query_aware=False,
    )  # fmt: skip
    codec = method.bind(LAYER)
    T, place = 90, 130
    plain, q = normal(2, T, DIM, seed=2), normal(2, 1, DIM, seed=3)
    keys = mx.array(turned(plain, np.arange(T)).astype(np.float32))[None]
    codes = codec.encode(keys, keys, range(T))
    query = mx.array(turned(q, np.array([place])).astype(np.float32))[None]
    found = np.array(codec.scores(codec.queries(query, range(place, place + 1)), codes, range(T)))

    decoded = turned(np.array(codec.decode(codes, range(T))[0])[0], np.arange(T), -1.0)
    distances = place - np.arange(T)
    half = DIM // 2
    theta = 10000.0 ** (-np.arange(half) / half)
    if rope == "single":
        phases = np.broadcast_to(np.exp(300j * theta), (T, half))
    elif rope == "exact":
        phases = np.exp(1j * distances[:, None] * theta)
    else:  # bands [16, 32), [32, 64), [64, 128), [128, 256): the mean of exp(i d theta) in each
        phases = np.empty((T, half), dtype=complex)
        for low in (16, 32, 64, 128):
            mean = np.exp(1j * np.arange(low, 2 * low)[:, None] * theta).mean(0)
            phases[(distances >= low) & (distances < 2 * low)] = mean
    qc = q[:, 0, :half] + 1j * q[:, 0, half:]
    kc = decoded[..., :half] + 1j * decoded[..., half:]
    expected = np.einsum("hl,tl,htl->ht", qc, phases, kc.conj()).real
    np.testing.assert_allclose(found[0, :, 0], expected, rtol=1e-3, atol=2e-3)
