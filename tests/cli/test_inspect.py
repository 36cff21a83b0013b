from __future__ import annotations

import json
from typing import Any

import pytest

from kvcompress import cli
from tests.fake_site import CODE, Site


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["inspect", *words])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def options(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    code, out, _ = inspect(capsys, words, "--json")
    assert code == 0
    return {option["name"]: option for option in json.loads(out)["options"]}


def test_inspect_shows_the_method_and_its_options(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    site.toy()
    code, out, _ = inspect(capsys, "toy")
    assert code == 0
    for part in ("toy: A toy.", "https://toys.org", "an integer from 1 to 8", "Bits per value."):
        assert part in out


def test_inspect_shows_the_values_given(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.toy()
    shown = options(capsys, "toy:bits=3:skip_layers=1+2")
    assert (shown["bits"]["value"], shown["bits"]["default"]) == (3, 4)
    assert shown["skip_layers"]["value"] == [1, 2]
    assert shown["mode"]["value"] == "fast"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("toy:bits=9", "toy: bits must be an integer from 1 to 8 (got '9')"),
        ("toy:bits=1:mode=good", "toy: bits must be 2 or more with mode='good' (got 1)"),
        ("toy:bits=2,3", "inspect shows one configuration; 'toy:bits=2,3' stands for 2"),
    ],
)
def test_inspect_refuses_what_is_not_legal(
    site: Site, capsys: pytest.CaptureFixture[str], words: str, complaint: str
) -> None:
    site.toy()
    assert inspect(capsys, words) == (2, "", f"error: {complaint}\n")


def test_a_method_that_still_lacks_its_calibration_can_be_inspected(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.toy()
    source = CODE.format(name="toy").replace("ConfigError", "CalibrationRequired")
    condition = 'if self.mode == "good" and self.bits < 2:'
    source = source.replace(condition, 'raise CalibrationRequired("toy: needs one")')
    site.module("toy_plugin_code", source.replace("            raise illegal", "        # "))
    assert options(capsys, "toy:bits=3")["bits"]["value"] == 3
