from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.cache.chunk import check_chunk
from kvcompress.errors import ConfigError
from tests.stand_ins import LAYER

KEYS, VALUES = (1, 2, 4, 32), (1, 2, 4, 16)


@pytest.mark.parametrize("batch", [0, 1])
def test_a_chunk_that_fits_passes(batch: int) -> None:
    check_chunk("m", LAYER, batch, mx.zeros(KEYS), mx.zeros(VALUES))


@pytest.mark.parametrize(
    ("keys", "values", "dtype", "batch", "text"),
    [
        (
            (1, 3, 4, 32),
            VALUES,
            mx.float32,
            0,
            r"keys must have shape \(B, 2, L, 32\) \(got \(1, 3",
        ),
        (KEYS, (1, 2, 4, 15), mx.float32, 0, r"values must have shape \(B, 2, L, 16\)"),
        ((2, 4, 32), VALUES, mx.float32, 0, r"\(got \(2, 4, 32\)\)"),
        (KEYS, VALUES, mx.float16, 0, r"keys must be float32 .* \(got float16\); make a new cache"),
        (KEYS, (1, 2, 3, 16), mx.float32, 0, "must have the same tokens"),
        (KEYS, VALUES, mx.float32, 3, r"batch size must stay 3 \(got 1\)"),
    ],
)
def test_any_other_is_refused_by_name(
    keys: tuple[int, ...], values: tuple[int, ...], dtype: mx.Dtype, batch: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=f"m: layer 0: .*{text}"):
        check_chunk("m", LAYER, batch, mx.zeros(keys, dtype), mx.zeros(values, dtype))


@pytest.mark.parametrize("keys", [None, [1.0], np.zeros(KEYS, np.float32)])
def test_what_is_no_array_is_refused_by_name(keys: Any) -> None:
    with pytest.raises(ConfigError, match=r"m: layer 0: keys must be an mx\.array"):
        check_chunk("m", LAYER, 0, keys, mx.zeros(VALUES))
