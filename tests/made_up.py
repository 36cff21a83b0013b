"""Tiny models with made-up weights that do not repeat themselves, and every method ready to use."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from tests.zoo import tiny

METHODS: dict[str, dict[str, Any]] = {
    "turboquant": {"bits": 2},
    "affine": {"bits": 4},
    "fp16": {},
    "a2ats": {"codebook": "random"},
    "commvq": {"codebook": "random"},
    "vecinfer": {"codebook": "random"},
}
"""Every method that comes with kvcompress, with options that need no calibration."""


def made_up(family: str, noise: float = 0.0) -> nn.Module:
    """A tiny model whose greedy text does not stick at one token.

    With some ``noise`` on its weights it is a draft model: right at times, and wrong at others.
    """
    model = tiny(family, head_dim=64, tie_word_embeddings=False)
    drawn, other = np.random.default_rng(14), np.random.default_rng(12)

    def weight(w: mx.array) -> mx.array:
        if w.ndim == 1:
            return w
        x = drawn.standard_normal(w.shape) + noise * other.standard_normal(w.shape)
        return mx.array((w.shape[-1] ** -0.5 * x).astype(np.float32))

    model.update(tree_map(weight, model.parameters()))
    mx.eval(model.parameters())
    return model


def words(count: int, seed: int = 0) -> mx.array:
    """Made-up tokens, ``(count,)``."""
    return mx.array(np.random.default_rng(seed).integers(0, 64, count))
