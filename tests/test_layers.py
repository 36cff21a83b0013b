from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec, Rotary
from tests.stand_ins import largest

KINDS = {
    "plain": Rotary(64, base=1e5),
    "linear": Rotary(64, base=1e4, scale=0.5),
    "traditional": Rotary(64, traditional=True),
    "partial": Rotary(16, base=1e6),
    "frequencies": Rotary(64, base=None, freqs=tuple(1.5**i for i in range(32))),
    "unrotated pairs": Rotary(64, base=None, freqs=(*(2.0**i for i in range(16)), *[np.inf] * 16)),
}


@pytest.mark.parametrize("kind", KINDS)
@given(start=st.integers(0, 131_072), count=st.integers(1, 9))
def test_unrotate_undoes_rotate_at_every_position(kind: str, start: int, count: int) -> None:
    rotary = KINDS[kind]
    x = mx.random.normal((1, 2, count, 64), key=mx.random.key(start))
    places = range(start, start + count)
    assert largest(rotary.unrotate(rotary.rotate(x, places), places) - x) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_angles_are_those_of_the_rotation(kind: str) -> None:
    rotary = KINDS[kind]
    x = mx.random.normal((1, 1, 1, 64), key=mx.random.key(0))
    out = np.array(rotary.rotate(x, range(37, 38)), dtype=np.float64)[0, 0, 0]
    row, half = np.array(x, dtype=np.float64)[0, 0, 0], rotary.dims // 2
    first = np.arange(half) * 2 if rotary.traditional else np.arange(half)
    second = first + 1 if rotary.traditional else first + half
    turned = (row[first] + 1j * row[second]) * np.exp(37j * rotary.angles)
    expected = row.copy()
    expected[first], expected[second] = turned.real, turned.imag
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_scattered_positions_are_each_their_own(kind: str) -> None:
    rotary, places = KINDS[kind], [900, 3, 3, 131_000, 0]
    x = mx.random.normal((2, 3, 5, 64), key=mx.random.key(1))
    together = rotary.rotate(x, places)
    for i, place in enumerate(places):
        alone = rotary.rotate(x[:, :, i : i + 1], range(place, place + 1))
        assert mx.array_equal(together[:, :, i : i + 1], alone)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dims": 5}, "dims must be even"),
        ({"dims": 4, "base": None}, "exactly one of base and freqs"),
        ({"dims": 4, "freqs": (1.0, 2.0)}, "exactly one of base and freqs"),
        ({"dims": 4, "base": None, "freqs": (1.0,)}, "2 entries"),
    ],
)
def test_a_rotation_that_makes_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Rotary(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_heads": 0}, "kv_heads must be positive"),
        ({"kv_heads": 2, "query_heads": 3}, "multiple of kv_heads=2"),
        ({"dtype": "int8"}, "float16, bfloat16 or float32"),
        ({"head_dim": 8, "rotary": Rotary(16)}, "exceed head_dim 8"),
    ],
)
def test_a_layer_that_makes_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LayerSpec(**options)


def test_layers_are_values() -> None:
    layer = LayerSpec(kv_heads=3, query_heads=9, rotary=KINDS["frequencies"])
    assert (layer.value_dim, layer.group, layer.mx_dtype) == (64, 3, mx.float16)
    assert copy.deepcopy(layer) == layer
    assert len({layer, copy.deepcopy(layer)}) == 1
