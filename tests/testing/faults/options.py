"""Options that are not what they say."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import attrs
import mlx.core as mx
from attrs import frozen

from kvcompress.config import array, integer
from kvcompress.errors import ConfigError
from kvcompress.testing import MethodConformance
from tests.testing.faults.plant import (
    method_fault,
    suite,
)
from tests.testing.sound import Sound


@method_fault("test_bad_values_are_refused")
@frozen(kw_only=True)
class Clamps(Sound):
    bits: int = integer(6, help="Bits a channel.")

    def check(self) -> None:
        object.__setattr__(self, "bits", min(max(self.bits, 3), 8))


@method_fault("test_bad_values_are_refused")
@frozen(kw_only=True)
class FailsInTheKernel(Sound):
    bits: int = integer(6, help="Bits a channel.")

    def check(self) -> None:
        mx.quantize(mx.zeros((1, 64)), bits=self.bits)


@method_fault("test_bad_values_are_refused")
@frozen(kw_only=True)
class NamelessRefusal(Sound):
    bits: int = integer(6, help="Bits a channel.")

    def check(self) -> None:
        if not 3 <= self.bits <= 8:
            raise ConfigError("illegal option")


def swallow(self: MethodConformance, **options: Any) -> Any:
    known = {option.name for option in attrs.fields(Sound)}
    return MethodConformance.build(self, **{k: v for k, v in options.items() if k in known})


suite("SwallowsUnknown", "test_unknown_options_are_refused", __name__, method=Sound, build=swallow)


@method_fault("test_every_parameter_is_declared")
@frozen(kw_only=True)
class UndeclaredOption(Sound):
    group: int = 32


@method_fault("test_arrays_of_wrong_shape_are_refused")
@frozen(kw_only=True)
class TakesAnyCodebook(Sound):
    codebook: Any = array("Levels that nobody looks at.")


@method_fault("test_json_gives_the_same_method")
@frozen(kw_only=True)
class AnotherFingerprintEachTime(Sound):
    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(os.urandom(8)).hexdigest()


@method_fault("test_every_option_counts")
@frozen(kw_only=True)
class ReadByNobody(Sound):
    residual_length: int = integer(32, low=0, high=64, help="Never used.")
