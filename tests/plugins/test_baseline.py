from __future__ import annotations

import pytest

import kvcompress as kv
from kvcompress.layers import LayerSpec


@pytest.mark.parametrize("bits", [0, 1, 7, 9, -1, 4.0, 3.5, "4", None, True])
def test_bits_are_never_clamped(bits: object) -> None:
    with pytest.raises(kv.ConfigError, match="affine: bits must be one of 2, 3, 4, 5, 6, 8"):
        kv.get_method("affine", bits=bits)


@pytest.mark.parametrize(
    ("dim", "asked", "group"),
    [(64, 64, 64), (128, 64, 64), (128, 128, 128), (64, 128, 64), (96, 64, 32), (160, 64, 32)],
)
def test_the_group_is_chosen_for_each_layer(dim: int, asked: int, group: int) -> None:
    codec = kv.get_method("affine", group_size=asked).bind(LayerSpec(head_dim=dim))
    scales = [f for f in codec.schema.fields if f.name.endswith("scales")]
    assert [f.width for f in scales] == [dim // group] * 2


def test_keys_and_values_of_other_sizes_have_groups_of_their_own() -> None:
    codec = kv.get_method("affine").bind(LayerSpec(head_dim=96, value_dim=128))
    widths = {f.name: f.width for f in codec.schema.fields}
    assert (widths["k.scales"], widths["v.scales"]) == (3, 2)


@pytest.mark.parametrize("name", ["head_dim", "value_dim"])
def test_a_head_that_no_group_divides_is_refused_by_name(name: str) -> None:
    layer = LayerSpec(index=7, **{"head_dim": 64, "value_dim": 64, name: 80})
    with pytest.raises(kv.ConfigError, match=rf"{name} must be a multiple of 32 .*7 has 80.*turbo"):
        kv.get_method("affine").bind(layer)
    with pytest.raises(kv.ConfigError, match="multiple of 32"):
        kv.get_method("affine", group_size=32).bind(layer)


def test_four_bits_take_four_and_a_half() -> None:
    schema = kv.get_method("affine").bind(LayerSpec(kv_heads=3, query_heads=9)).schema
    assert schema.bytes_per_token * 8 / (2 * 3 * 64) == 4.5
    assert schema.payload_bits == 4 * 2 * 3 * 64


def test_fp16_has_no_codec() -> None:
    with pytest.raises(kv.ConfigError, match="fp16: layer 0 keeps the model's own cache"):
        kv.get_method("fp16").bind(LayerSpec())
