"""Hypothesis strategies for layers, chunks, masks and the like."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvcompress.layers import LayerSpec, Rotary
from kvcompress.testing.data import HOSTILE

HEAD_DIMS = (
    36, 40, 48, 60, 63, 64, 72, 80, 96, 100, 112, 120, 128, 144, 160, 192, 240, 256, 288, 320,
    512, 576,
)  # fmt: skip
"""Head sizes of real models, and those that break a careless Hadamard transform."""

_COMMON_DIMS = (64, 64, 128, 80, 96)
DTYPES = ("float32", "float16", "bfloat16")


def seeds() -> SearchStrategy[int]:
    """Seeds of tokens."""
    return st.integers(0, 10_000)


@st.composite
def rotaries(draw: DrawFn, head_dim: int) -> Rotary | None:
    """Rotations as models have them: none, full, partial, traditional, scaled, or by table."""
    kind = draw(st.sampled_from(("full", "none", "partial", "traditional", "linear", "table")))
    whole = head_dim - head_dim % 2
    if kind == "none":
        return None
    if kind == "partial":
        return Rotary(max(2, whole // 4 * 2), base=1e4)
    if kind == "traditional":
        return Rotary(whole, traditional=True, base=1e4)
    if kind == "linear":
        return Rotary(whole, base=1e4, scale=draw(st.sampled_from((0.25, 0.5))))
    if kind == "table":
        # As Llama 3: long waves stretched; and pairs that do not turn at all.
        lengths = 5e5 ** (np.arange(whole // 2) * 2.0 / whole)
        lengths = np.where(lengths > 1e3, 8 * lengths, lengths)
        if draw(st.booleans()):
            lengths[len(lengths) * 3 // 4 :] = np.inf
        return Rotary(whole, base=None, freqs=tuple(lengths.tolist()))
    return Rotary(whole, base=draw(st.sampled_from((1e4, 1e6))))


@st.composite
def layers(
    draw: DrawFn,
    head_dims: Sequence[int] = _COMMON_DIMS + HEAD_DIMS,
    dtypes: Sequence[str] = DTYPES,
) -> LayerSpec:
    """Layers: sizes, grouped heads, values of another size at times, any rotation or unknown."""
    head_dim = draw(st.sampled_from(tuple(head_dims)))
    kv_heads = draw(st.integers(1, 3))
    rotary = draw(rotaries(head_dim))
    return LayerSpec(
        kv_heads=kv_heads,
        query_heads=kv_heads * draw(st.integers(1, 4)),
        head_dim=head_dim,
        value_dim=draw(st.sampled_from((0, 0, 0, 32, 64))),
        dtype=draw(st.sampled_from(tuple(dtypes))),
        rotary=rotary,
        rotary_known=rotary is not None or draw(st.booleans()),
    )


@st.composite
def chunkings(draw: DrawFn, total: int) -> list[int]:
    """Sizes of chunks, single tokens among them, that make up ``total`` tokens."""
    out: list[int] = []
    while (left := total - sum(out)) > 0:
        size = draw(st.sampled_from((1, 1, 2, 3, 7, 16, 17, 64, total)))
        run = draw(st.integers(1, 8)) if size == 1 else 1
        out += [min(size, left)] if size > 1 else [1] * min(run, left)
    return out


def hostile_kinds() -> SearchStrategy[str]:
    """The kinds of hostile token."""
    return st.sampled_from(HOSTILE)


@st.composite
def masks(
    draw: DrawFn, batch: int, heads: int, queries: int, tokens: int, dtype: mx.Dtype
) -> mx.array | str | None:
    """Masks as models hand them over; every query sees at least its own token."""
    kind = draw(st.sampled_from(("none", "causal", "bool", "additive")))
    if kind == "none":
        return None
    if kind == "causal":
        return "causal"
    leading = draw(st.sampled_from(((), (1, 1), (batch, 1), (1, heads), (batch, heads))))
    chance = np.random.default_rng(draw(seeds()))
    shown = chance.random((*leading, queries, tokens)) > draw(st.sampled_from((0.1, 0.6)))
    shown |= np.arange(tokens) == np.arange(tokens - queries, tokens)[:, None]
    if kind == "bool":
        return mx.array(shown)
    slope = -0.01 * np.arange(tokens)[::-1]  # as ALiBi
    return mx.array(np.where(shown, slope, -np.inf).astype(np.float32)).astype(dtype)
