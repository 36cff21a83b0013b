"""Codes that decode to something else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from attrs import evolve, frozen

from kvcompress.codec import Codes, KVCodec
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.stages.base import Coder, Fields
from kvcompress.stages.rope import PreRope, Queries, RopePolicy
from tests.testing.faults.plant import (
    codec_fault,
    coder_fault,
    method_fault,
)
from tests.testing.sound import Grid, MaxAbs, Sound


@coder_fault("test_decoded_rows_resemble_what_came")
@frozen
class AnotherHeadsCodes(MaxAbs):
    def decode(self, fields: Fields) -> mx.array:
        return super().decode({k: mx.roll(a, 1, axis=3) for k, a in fields.items()})


@coder_fault("test_hostile_values_stay_in_bounds")
@frozen
class NormInFloat16(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        half = z.astype(mx.float16)
        norm = mx.sqrt((half * half).sum(axis=-1, keepdims=True)).astype(mx.float32)
        true = mx.sqrt(z.square().sum(axis=-1, keepdims=True))
        return {**fields, "scale": fields["scale"] * norm / mx.maximum(true, 1e-30)}


@coder_fault("test_hostile_values_stay_in_bounds")
@frozen
class DividesByZero(MaxAbs):
    def decode(self, fields: Fields) -> mx.array:
        return super().decode(fields) * (fields["scale"] / fields["scale"])


@coder_fault("test_size_does_not_hurt")
@frozen
class ScaleSaturates(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        return {**fields, "scale": mx.minimum(fields["scale"], 300.0)}


@method_fault("test_half_precision_is_coded_as_single")
@frozen(kw_only=True)
class NormInTheLayersDtype(Sound):
    def bind(self, layer: LayerSpec) -> KVCodec:
        sound = Sound.bind(self, layer)
        if layer.dtype != "float16":
            return sound
        coder = NormInFloat16(Grid(self.bits, layer.head_dim), layer.kv_heads)
        return KVCodec(layer, evolve(sound.keys, coder=coder), sound.values, sound.rope)


@method_fault("test_more_bits_distort_less")
@frozen(kw_only=True)
class BitsCutShort(Sound):
    def coder(self, dim: int, heads: int) -> Coder:
        return MaxAbs(Grid(min(self.bits, 3), dim), heads)


@method_fault("test_outlier_channels_yield_to_bits")
@frozen(kw_only=True)
class OutliersOverflowTheScale(Sound):
    def coder(self, dim: int, heads: int) -> Coder:
        return MaxAbs(Grid(min(self.bits, 4), dim), heads)


@frozen
class WrongBase(PreRope):
    def _wrong(self, rotary: Rotary | None) -> Rotary | None:
        if rotary is None or rotary.base is None:
            return rotary
        return evolve(rotary, base=500.0)

    def to_code(self, keys: Any, mean: Any, rotary: Any, positions: Any) -> mx.array:
        return super().to_code(keys, mean, self._wrong(rotary), positions)

    def from_code(self, keys: Any, mean: Any, rotary: Any, positions: Any) -> mx.array:
        return super().from_code(keys, mean, self._wrong(rotary), positions)


@method_fault("test_codes_do_not_depend_on_position", options={"frame": "pre", "centre": True})
@frozen(kw_only=True)
class BaseFromADefault(Sound):
    def policy(self) -> RopePolicy:
        return WrongBase()


@codec_fault("test_the_centre_is_the_mean_before_rope", centre=True)
class MeanOfRotatedKeys(KVCodec):
    def begin(self, keys: mx.array, values: mx.array, positions: Any) -> dict[str, mx.array]:
        made = super().begin(keys, values, positions)
        return {**made, "k.mean": self.keys.centre.of(keys.astype(mx.float32))}


@codec_fault("test_scores_are_those_of_decoded_keys", centre=True)
class ScoresWithoutMean(KVCodec):
    def scores(self, queries: Queries, codes: Codes, positions: range) -> mx.array:
        none = {name: mx.zeros_like(a) for name, a in codes.constants.items()}
        return super().scores(queries, Codes(codes.fields, none), positions)


@codec_fault("test_mixed_values_are_those_of_decoded_ones", centre=True)
class OutputsWithoutMean(KVCodec):
    def outputs(self, mixed: mx.array, mass: mx.array, constants: Fields) -> mx.array:
        return self.values.transform.inverse(mixed)
