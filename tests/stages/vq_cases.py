"""Vector quantisers of every kind and size, and brute force to hold them against."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvcompress.layers import Rotary
from kvcompress.stages.commuting_vq import CommutingVQ
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.residual_vq import ResidualVQ
from kvcompress.stages.tables import TableQuantiser

HEADS = 2


@cache
def places_round_alike() -> bool:
    """Whether a row's product is the same wherever it stands among others; not in every BLAS."""
    x, a = (mx.random.normal((n, 16), key=mx.random.key(n)) for n in (64, 16))
    whole = x @ a
    return all(bool(mx.array_equal(whole[i : i + 32], x[i : i + 32] @ a)) for i in range(32))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows(dim: int, tokens: int, seed: int = 0, batch: int = 1) -> mx.array:
    """Gaussian rows ``(batch, HEADS, tokens, dim)``."""
    return mx.array(normal(batch, HEADS, tokens, dim, seed=seed))


def product(
    dim: int, bits: int, size: int = 4, heads: int = HEADS, spaces: int = 0, seed: int = 0
) -> ProductVQ:
    book = normal(heads, spaces or dim // size, 2**bits, size, seed=bits + seed)
    return ProductVQ(book, dim)


def residual(dim: int, bits: int, size: int = 4) -> ResidualVQ:
    books = [0.6**r * normal(HEADS, dim // size, 2**bits, size, seed=r) for r in range(3)]
    for book in books[1:]:
        book[:, :, 0] = 0
    return ResidualVQ.of([mx.array(book) for book in books])


def commuting(
    dim: int, bits: int, rest: int = 0, traditional: bool = False, stages: int = 3
) -> CommutingVQ:
    dims = dim - rest
    shrink = 0.6 ** np.arange(stages).reshape(stages, 1, 1, 1)
    turning = (shrink * normal(HEADS, stages, 2**bits, 2, dims // 2)).astype(np.float32)
    still = (shrink * normal(HEADS, stages, 2, 2**bits, rest, seed=1)).astype(np.float32)
    turning[:, :, 0], still[:, :, :, 0] = 0, 0
    rotary = Rotary(dims, traditional) if dims else None
    return CommutingVQ(turning, rotary, still if rest else None)


MAKE: dict[str, Callable[[int, int], TableQuantiser]] = {
    "product": product,
    "product, one book a head": lambda dim, bits: product(dim, bits, spaces=1),
    "product, one book for all": lambda dim, bits: product(dim, bits, heads=1, spaces=1),
    "residual": lambda dim, bits: residual(dim, min(bits, 8)),
    "commuting": lambda dim, bits: commuting(dim, min(bits, 6)),
    "commuting, partial": lambda dim, bits: commuting(dim, min(bits, 4), rest=4, traditional=True),
}


def cut(x: Any, size: int) -> np.ndarray:
    """``(B, H, T, D)`` as sub-vectors ``(B, H, T, D / size, size)``."""
    array = np.array(x)
    return array.reshape(*array.shape[:3], -1, size)


def all_distances(x: Any, codebook: Any, size: int) -> np.ndarray:
    """``(B, H, T, n, K)`` squared distances by definition, float64."""
    subs = cut(x, size).astype(np.float64)
    H, n = subs.shape[1], subs.shape[3]
    book = np.array(codebook).astype(np.float64)
    whole = np.broadcast_to(book, (H, n, *book.shape[2:]))
    return np.asarray(np.square(subs[..., None, :] - whole[None, :, None]).sum(-1))
