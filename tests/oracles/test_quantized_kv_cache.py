"""``affine`` against the quantised cache of mlx-lm, which it must match word for word."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

import kvcompress as kv
from kvcompress.layers import LayerSpec


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_scales_and_biases_are_the_same(dtype: str, bits: int) -> None:
    layer = LayerSpec(kv_heads=2, query_heads=6, head_dim=64, dtype=dtype)
    keys, values = (
        (mx.random.normal((1, 2, 40, 64), key=mx.random.key(seed)) * 5).astype(getattr(mx, dtype))
        for seed in (1, 2)
    )
    stock = QuantizedKVCache(group_size=64, bits=bits)
    expected = dict(zip(("k.", "v."), stock.update_and_fetch(keys, values), strict=True))

    codec = kv.get_method("affine", bits=bits).bind(layer)
    codes = codec.encode(keys, values, range(40))
    for prefix, arrays in expected.items():
        for name, array in zip(("codes", "scales", "biases"), arrays, strict=True):
            assert mx.array_equal(codes.fields[prefix + name], array), prefix + name

    decoded = codec.decode(codes, range(40))
    for got, (words, scales, biases) in zip(decoded, expected.values(), strict=True):
        theirs = mx.dequantize(words, scales, biases, group_size=64, bits=bits)
        # MLX rounds scale * code and the sum to the dtype, where ours is rounded once.
        unit = {"float16": 2**-11, "bfloat16": 2**-8}[dtype] * mx.abs(theirs).max().item()
        np.testing.assert_allclose(
            got.astype(mx.float32), theirs.astype(mx.float32), rtol=0, atol=2 * unit
        )
