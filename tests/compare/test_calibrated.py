from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcompress.cache.trace import trace
from kvcompress.calibrate import demo
from kvcompress.compare.calibrated import description, embedded_layer, lacking, make
from kvcompress.compare.methods import method_of

WORDS = (
    "fp16",
    "affine",
    "turboquant",
    "turboquant:centre=calibrated",
    "rows",
    "rows:entries=4",
    "misfit",
    "needy",
    "plain",
)


def test_what_lacks_a_calibration_is_found_without_a_model(
    strangers: None, embedded: tuple[str, list[int]]
) -> None:
    found = lacking(WORDS)
    assert list(found) == ["turboquant:centre=calibrated", "rows", "rows:entries=4", "misfit"]
    assert found["rows:entries=4"] == method_of("rows:entries=4")
    assert embedded[1] == []


def test_who_was_given_one_lacks_none(
    strangers: None, embedded: tuple[str, list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "rows.safetensors"
    made = make(lacking(["rows"]))
    assert made.calibration is not None
    made.calibration.save(path)
    words = [f"rows:calibration={path}", f"rows:entries=4:calibration={path}", "rows"]
    assert list(lacking(words)) == ["rows"]


def test_one_pass_serves_all_and_is_kept(
    strangers: None, embedded: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    wanted = lacking(["rows", "rows:entries=4", "turboquant:centre=calibrated"])
    made = make(wanted, lambda step, done, total: steps.append(step))
    assert embedded[1] == [1]
    assert list(dict.fromkeys(steps)) == [
        "recording",
        "fitting rows entries=16",
        "fitting rows entries=4",
    ]
    assert made.methods == set(wanted)
    assert made.errors == {}
    again = make(wanted)
    assert embedded[1] == [1]
    assert again.calibration is not None
    assert made.calibration is not None
    assert again.calibration.fingerprint == made.calibration.fingerprint
    described = description(made.calibration)
    assert described["methods"] == ["rows entries=16", "rows entries=4"]
    assert described["tokens"] == demo.TOKENS


def test_one_that_cannot_be_fitted_leaves_the_others_theirs(
    strangers: None, embedded: tuple[str, list[int]]
) -> None:
    made = make(lacking(["misfit", "rows", "misfit:entries=4"]))
    assert made.methods == {"rows"}
    assert made.calibration is not None
    assert [fit.key.method for fit in made.calibration.fits] == ["rows"]
    error = "ArithmeticError: these tokens are not to its taste"
    assert made.errors == {"misfit": error, "misfit:entries=4": error}


def test_where_nothing_can_be_made_each_row_gets_the_error(
    strangers: None, embedded: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(demo, "load_model", broken)
    made = make(lacking(["rows", "rows:entries=4"]))
    assert made.calibration is None
    assert made.methods == frozenset()
    assert made.errors == dict.fromkeys(["rows", "rows:entries=4"], "OSError: no space left")


def test_nothing_is_made_for_nobody(embedded: tuple[str, list[int]]) -> None:
    assert make({}).calibration is None
    assert embedded[1] == []


@pytest.mark.model
def test_the_embedded_models_layers_are_as_they_are_said_to_be(demo: tuple[Any, Any]) -> None:
    layers = [slot.layer for slot in trace(demo[0])]
    assert {attrs.evolve(layer, index=0) for layer in layers if layer} == {embedded_layer()}
    assert None not in layers
