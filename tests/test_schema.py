from __future__ import annotations

import mlx.core as mx

from kvcompress.schema import Field, Schema


def test_bytes_and_bits_of_a_token() -> None:
    schema = Schema(
        (
            Field("k.codes", "uint32", 8, 3, 256),
            Field("k.gain", "uint16", 1, 3),
            Field("v.codes", "uint8", 4, 3, 32),
            Field("v.shared", "float16", 1, 1),
        ),
        (Field("k.mean", "float32", 64, 3),),
    )
    assert schema.bytes_per_token == 3 * 32 + 3 * 2 + 3 * 4 + 2
    assert schema.part_bytes("k.") == 102
    assert schema.part_bytes("v.") == 14
    assert schema.constant_bytes == 64 * 3 * 4
    assert schema.payload_bits == 3 * (256 + 32)


def test_allocated_bytes_are_the_predicted_ones() -> None:
    field = Field("k.codes", "uint32", 5, 3)
    array = field.allocate(2, 7)
    assert (array.shape, array.dtype) == ((2, 3, 7, 5), mx.uint32)
    assert array.nbytes == 2 * 7 * field.bytes_per_token
