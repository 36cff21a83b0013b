"""The rotation that a trace learns undoes, at every position, what the model's own modules do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcompress.cache.slot import Slot
from kvcompress.cache.trace import trace
from tests.zoo import logits, tiny

LAST = 131_072
CHUNK = mx.array([[5, 3, 9, 1]])
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
PAIRS = [1.0 + i / 4 for i in range(8)]
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}

# Families with arguments that give each kind of rotation, of released models where there are.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"rope_theta": 1e6}),
    "traditional": ("llama", {"rope_traditional": True}),
    "traditional by the family": ("cohere", {"rope_theta": 8e6}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "llama3": (
        "llama",
        {
            "rope_theta": 5e5,
            "rope_scaling": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
        },
    ),
    "llama3, short": (
        "llama",
        {"rope_scaling": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 64}},
    ),
    "yarn": (
        "qwen3",
        {
            "rope_theta": 1e6,
            "rope_scaling": {**YARN, "original_max_position_embeddings": 32768},
        },
    ),
    "yarn with mscale": (
        "llama",
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 64, "mscale": 2.0}},
    ),
    "yarn by the family": ("ministral3", {}),
    "longrope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": PAIRS,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": LAST,
        },
    ),
    "longrope by the family": ("phimoe", {}),
    "partial": ("phi", {}),
    "partial, a quarter": ("gpt_neox", {}),
    "partial traditional": ("glm4", {}),
    "proportional": (
        "gemma4_text",
        {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": {}}},
    ),
    "in sections": ("qwen3_5", {}),
    "none in some layers": ("smollm3", {}),
}


@cache
def learnt(kind: str) -> tuple[nn.Module, tuple[Slot, ...]]:
    family, options = KINDS[kind]
    model = tiny(family, **options)
    return model, trace(model)


class Recorder:
    """Keeps the keys of one chunk that starts at ``offset``."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.keys = mx.zeros(0)

    def make_mask(self, N: int, **_: Any) -> str:
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = keys
        return keys, values


@contextmanager
def inputs_of_rope() -> Iterator[list[mx.array]]:
    """What ``mx.fast.rope`` is given meanwhile."""
    before: list[mx.array] = []
    rope = mx.fast.rope

    def record(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        before.append(x)
        return rope(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "rope", record)
        yield before


@pytest.mark.parametrize("kind", KINDS)
@given(offset=st.integers(0, LAST - CHUNK.size))
@example(0)
@example(LAST - CHUNK.size)
def test_the_rotation_learnt_undoes_what_the_model_does(kind: str, offset: int) -> None:
    model, slots = learnt(kind)
    own = model.make_cache() if hasattr(model, "make_cache") else slots
    caches = [
        Recorder(offset) if slot.kind == "compress" else cache
        for slot, cache in zip(slots, own, strict=True)
    ]
    with inputs_of_rope() as before:
        mx.eval(logits(model, CHUNK, caches))
    rotated = 0
    for slot, recorder in zip(slots, caches, strict=True):
        if slot.layer is None:
            continue
        assert slot.layer.rotary_known
        if slot.layer.rotary is None:
            continue
        plain = slot.layer.rotary.unrotate(recorder.keys, range(offset, offset + CHUNK.size))
        turned = [x for x in before if x.shape == plain.shape]
        error = min(float(mx.abs(plain - x).max()) for x in turned)
        assert error < 1e-5 * float(mx.abs(plain).max())
        rotated += 1
    assert rotated


@pytest.mark.parametrize("kind", KINDS)
def test_the_kinds_are_what_they_are_called(kind: str) -> None:
    rotations = [s.layer.rotary for s in learnt(kind)[1] if s.layer]
    (rotary,) = {r for r in rotations if r is not None}
    head = next(s.layer.head_dim for s in learnt(kind)[1] if s.layer)
    assert (None in rotations) == ("none" in kind)
    assert rotary.traditional == ("traditional" in kind)
    assert (rotary.dims < head) == (kind.startswith("partial") or kind == "in sections")
    assert (rotary.scale != 1) == (kind == "linear")
    by_table = ("llama3", "yarn", "longrope", "proportional")
    assert (rotary.freqs is not None) == kind.startswith(by_table)
    if kind == "proportional":
        assert rotary.freqs is not None
        assert rotary.freqs[-1] == float("inf")
