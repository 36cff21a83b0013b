"""Tables and sizes that go wrong in another process."""

from __future__ import annotations

import os

import mlx.core as mx
import numpy as np
from attrs import frozen

from kvcompress.codec import KVCodec
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec
from tests.testing.faults.plant import (
    method_fault,
    transform_fault,
)
from tests.testing.sound import Flip, Sound


@method_fault("test_head_sizes_bind_or_are_refused")
@frozen(kw_only=True)
class RefusesNamelessly(Sound):
    def bind(self, layer: LayerSpec) -> KVCodec:
        if layer.head_dim == 100:
            raise ConfigError("sound: this layer does not fit")
        return super().bind(layer)


@method_fault("test_head_sizes_bind_or_are_refused")
@frozen(kw_only=True)
class EndsTheProcess(Sound):
    def bind(self, layer: LayerSpec) -> KVCodec:
        if layer.head_dim == 120:
            os._exit(134)
        return super().bind(layer)


@transform_fault("test_head_sizes_bind_or_are_refused")
@frozen(eq=False)
class WrongAtOneSize(Flip):
    def inverse(self, z: mx.array) -> mx.array:
        return super().inverse(z if self.dim != 63 else z[..., ::-1])


@transform_fault("test_other_processes_code_alike")
@frozen(eq=False)
class TablesByHash(Flip):
    @property
    def table(self) -> mx.array:
        drawn = np.random.default_rng(hash("flip") % 2**32).standard_normal(self.dim)
        return mx.array(np.exp(drawn).astype(np.float32))
