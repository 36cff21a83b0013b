from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvcompress as kv
from kvcompress.cache import CompressedKVCache
from kvcompress.layers import LayerSpec
from kvcompress.testing.subject import step_of

CHUNK = 8


def step(dtype: str, window: int) -> Any:
    """What the last of two chunks attends to, and its queries."""
    layer = LayerSpec(kv_heads=2, query_heads=4, head_dim=32, dtype=dtype)
    method = kv.get_method("turboquant", bits=8, window=window, centre="none", sinks=0, block=16)
    cache = CompressedKVCache(method, layer, method.bind(layer))
    rows = mx.random.normal((1, 2, 64 + CHUNK, 32), key=mx.random.key(0)).astype(layer.mx_dtype)
    cache.update_and_fetch(rows[:, :, :64], rows[:, :, :64])
    keys, _ = cache.update_and_fetch(rows[:, :, 64:], rows[:, :, 64:])
    q = mx.random.normal((1, 4, CHUNK, 32), key=mx.random.key(1)).astype(layer.mx_dtype)
    return step_of(keys), q


@pytest.mark.parametrize("window", [128, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("made", [mx.float16, mx.bfloat16, mx.float32])
def test_additive_masks_of_every_float_type_are_taken(
    dtype: str, made: mx.Dtype, window: int
) -> None:
    attends, q = step(dtype, window)
    seen = mx.arange(64, 64 + CHUNK)[:, None] >= mx.arange(64 + CHUNK)
    additive = mx.where(seen, 0.0, -mx.inf).astype(made)
    out = attends.attend(q, scale=0.2, mask=additive)
    expected = attends.attend(q, scale=0.2, mask=seen)
    assert out.dtype == q.dtype
    np.testing.assert_allclose(
        np.array(out.astype(mx.float32)), np.array(expected.astype(mx.float32)), atol=2e-2
    )


@pytest.mark.parametrize("window", [128, 16])
@pytest.mark.parametrize("shape", [(CHUNK, 71), (CHUNK - 1, 64 + CHUNK), (1, 1, 5, 64 + CHUNK)])
def test_masks_that_do_not_fit_are_refused_by_name(shape: tuple[int, ...], window: int) -> None:
    attends, q = step("float32", window)
    with pytest.raises(kv.ConfigError, match=r"attention: mask must end in \(8, 72\)"):
        attends.attend(q, scale=0.2, mask=mx.zeros(shape))


@pytest.mark.parametrize("window", [128, 16])
@pytest.mark.parametrize(
    "shape", [(1, 3, 8, 32), (2, 4, 8, 32), (1, 4, 8, 16), (4, 8, 32), (1, 0, 8, 32)]
)
def test_queries_that_do_not_fit_are_refused_by_name(shape: tuple[int, ...], window: int) -> None:
    attends, _ = step("float32", window)
    for ask in (attends.attend, attends.unread_share):
        with pytest.raises(kv.ConfigError, match=r"attention: layer 0: queries must be floats of"):
            ask(mx.zeros(shape), scale=0.2)


@pytest.mark.parametrize("window", [128, 16])
@pytest.mark.parametrize("sinks", [mx.zeros((2,)), mx.zeros((1, 4)), mx.array(0.0)])
def test_learnt_logits_that_do_not_fit_are_refused_by_name(sinks: mx.array, window: int) -> None:
    attends, q = step("float32", window)
    with pytest.raises(kv.ConfigError, match=r"sinks must be floats of shape \(4,\)"):
        attends.attend(q, scale=0.2, sinks=sinks)


@pytest.mark.parametrize("window", [128, 16])
def test_no_queries_get_no_answers(window: int) -> None:
    attends, q = step("float32", window)
    out = attends.attend(q[:, :, :0], scale=0.2)
    assert out.shape == (1, 4, 0, 32)


@pytest.mark.parametrize("window", [128, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("made", [mx.float16, mx.bfloat16, mx.float32])
def test_learnt_logits_and_queries_of_every_float_type_are_taken(
    dtype: str, made: mx.Dtype, window: int
) -> None:
    attends, q = step(dtype, window)
    for queries in (q, q.astype(made)):
        out = attends.attend(queries, scale=0.2, mask="causal", sinks=mx.ones(4, dtype=made))
        expected = attends.attend(q, scale=0.2, mask="causal", sinks=mx.ones(4, dtype=q.dtype))
        assert out.dtype == queries.dtype
        np.testing.assert_allclose(
            np.array(out.astype(mx.float32)), np.array(expected.astype(mx.float32)), atol=2e-2
        )


@pytest.mark.parametrize("window", [128, 16])
def test_of_no_queries_nothing_is_left_unread(window: int) -> None:
    attends, q = step("float32", window)
    assert attends.unread_share(q[:, :, :0], scale=0.2).shape == (1, 4, 0)
