from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.layers import LayerSpec
from kvcompress.testing.data import HOSTILE, hostile_tokens, tokens
from kvcompress.testing.law import numbers
from kvcompress.testing.random_state import random_states
from kvcompress.testing.strategies import HEAD_DIMS, chunkings, layers


@given(layer=layers(), count=st.integers(1, 9), start=st.integers(0, 50))
def test_tokens_fit_their_layer(layer: LayerSpec, count: int, start: int) -> None:
    before = random_states()
    came = tokens(layer, count, batch=2, start=start)
    assert random_states() == before
    assert came.queries.shape == (2, layer.query_heads, count, layer.head_dim)
    assert came.keys.shape == (2, layer.kv_heads, count, layer.head_dim)
    assert came.values.shape == (2, layer.kv_heads, count, layer.value_dim)
    assert came.positions == range(start, start + count)
    assert {came.queries.dtype, came.keys.dtype, came.values.dtype} == {layer.mx_dtype}
    assert layer.head_dim in HEAD_DIMS


@given(total=st.integers(1, 200), data=st.data())
def test_chunks_make_up_the_whole(total: int, data: st.DataObject) -> None:
    chunks = data.draw(chunkings(total))
    assert sum(chunks) == total
    assert min(chunks) >= 1


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_hostile_tokens_are_finite_themselves(kind: str, dtype: str) -> None:
    layer = LayerSpec(kv_heads=2, query_heads=2, head_dim=80, dtype=dtype)
    came = hostile_tokens(layer, kind, 5)
    assert np.isfinite(numbers(came.keys)).all()
    assert np.isfinite(numbers(came.values)).all()


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unkind"):
        hostile_tokens(LayerSpec(), "unkind", 1)
