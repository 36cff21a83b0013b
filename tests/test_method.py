from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from attrs import evolve, frozen
from attrs.exceptions import FrozenInstanceError
from hypothesis import given

from kvcompress import CompressionMethod, ConfigError, Method, MethodInfo
from kvcompress.config import config_strategy, illegal, integer, options_of, to_json
from kvcompress.method import calibration_field


@frozen(kw_only=True)
class Toy(Method):
    name: ClassVar[str] = "toy"
    bits: int = integer(4, low=1, high=8, help="Bits.")
    calibration: Any = calibration_field()

    def check(self) -> None:
        if self.bits == 1 and self.sinks == 0:
            raise illegal(self, "sinks", "1 or more with bits=1")

    def bind(self, layer: Any) -> Any:
        return layer


def test_a_method_has_the_common_options_after_its_own() -> None:
    toy = Toy()
    assert isinstance(toy, CompressionMethod)
    assert [option.name for option in options_of(Toy)] == [
        "bits",
        "window",
        "sinks",
        "skip_layers",
        "block",
    ]
    assert (toy.window, toy.sinks, toy.skip_layers, toy.block) == (128, 4, (0, 0), 32)
    assert toy.config() == {
        "bits": 4,
        "window": 128,
        "sinks": 4,
        "skip_layers": [0, 0],
        "block": 32,
    }


def test_a_method_is_an_immutable_value() -> None:
    toy = Toy(bits=3)
    assert toy == Toy(bits=3)
    assert hash(toy) == hash(Toy(bits=3))
    with pytest.raises(FrozenInstanceError):
        toy.bits = 4  # type: ignore[misc]
    with pytest.raises(ConfigError, match="toy: bits"):
        evolve(toy, bits=9)


@pytest.mark.parametrize("options", [{"window": 1.5}, {"sinks": -1}, {"block": 48}, {"block": 0}])
def test_the_common_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^toy: {next(iter(options))} must be "):
        Toy(**options)


def test_options_are_checked_together() -> None:
    with pytest.raises(ConfigError, match=r"toy: sinks must be 1 or more with bits=1 \(got 0\)"):
        Toy(bits=1, sinks=0)


@given(config_strategy(Toy), config_strategy(Toy))
def test_the_fingerprint_tells_configurations_apart(first: Toy, second: Toy) -> None:
    assert (first.fingerprint == second.fingerprint) == (first == second)


def test_the_fingerprint_depends_on_the_name_and_the_calibration() -> None:
    @frozen(kw_only=True)
    class Other(Toy):
        name: ClassVar[str] = "other"

    calibrated = [Toy(calibration=SimpleNamespace(fingerprint=f)) for f in ("a", "b", "a")]
    prints = {Toy().fingerprint, Other().fingerprint, *(toy.fingerprint for toy in calibrated)}
    assert len(prints) == 4
    assert calibrated[0] == calibrated[2] != calibrated[1]


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    program = (
        "from typing import ClassVar; from attrs import frozen; from kvcompress import Method\n"
        "@frozen(kw_only=True)\n"
        "class Plain(Method):\n"
        "    name: ClassVar[str] = 'plain'\n"
        "    def bind(self, layer): return layer\n"
        "print(Plain(skip_layers=1).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1
    assert len(prints.pop().strip()) == 64


def test_a_calibration_is_an_object_with_a_fingerprint() -> None:
    with pytest.raises(ConfigError, match="toy: calibration must be a Calibration or the path"):
        Toy(calibration=3)
    assert "calibration" not in to_json(Toy(calibration=SimpleNamespace(fingerprint="a")))


def test_a_class_without_bind_cannot_be_made() -> None:
    @frozen(kw_only=True)
    class Half(Method):
        name: ClassVar[str] = "half"

    with pytest.raises(TypeError, match="bind"):
        Half()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"name": "Upper"}, "name must be lower-case"),
        ({"name": "a:b"}, "name must be lower-case"),
        ({"name": ""}, "name must be lower-case"),
        ({"summary": ""}, "summary must be one line"),
        ({"summary": "a\nb"}, "summary must be one line"),
        ({"target": "module"}, "target must be 'module:attribute'"),
        ({"target": "module:a b"}, "target must be 'module:attribute'"),
        ({"capabilities": "fast"}, "capabilities must be a set of words"),
        ({"capabilities": 5}, "capabilities must be a set of words"),
        ({"capabilities": [1, "fast"]}, "capabilities must be a set of words"),
        ({"paper": 5}, "paper must be one line"),
        ({"paper": "a\nb"}, "paper must be one line"),
        ({"api_version": "1"}, r"api_version must be an integer of at least 1 \(got '1'\)"),
        ({"api_version": True}, "api_version must be an integer"),
        ({"api_version": 0}, "api_version must be an integer of at least 1"),
        ({"needs_calibration": "maybe"}, "needs_calibration must be true or false"),
    ],
)
def test_a_description_is_checked(given: dict[str, Any], complaint: str) -> None:
    values = {"name": "toy", "summary": "A toy.", "target": "toys:Toy"}
    with pytest.raises(ConfigError, match=complaint):
        MethodInfo(**{**values, **given})


def test_a_description_says_what_the_method_can_do() -> None:
    info = MethodInfo("toy", "A toy.", "toys.code:Toy", capabilities={"batch"})
    assert info.capabilities == frozenset({"batch"})
    assert (info.api_version, info.needs_calibration, info.paper) == (1, False, "")
