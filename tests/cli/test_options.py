from __future__ import annotations

from pathlib import Path

import pytest

from kvcompress import ConfigError, UnknownMethod, get_method
from kvcompress.cli.options import MethodSpec, parse_method
from tests.fake_site import Site


def test_a_name_alone_is_one_configuration(site: Site) -> None:
    site.toy()
    assert parse_method("toy") == (MethodSpec("toy", {}, "toy"),)


def test_several_values_make_a_grid(site: Site) -> None:
    site.toy()
    specs = parse_method("toy:bits=2,3:mode=fast,good:window=-1")
    assert [spec.options for spec in specs] == [
        {"bits": 2, "mode": "fast", "window": -1},
        {"bits": 2, "mode": "good", "window": -1},
        {"bits": 3, "mode": "fast", "window": -1},
        {"bits": 3, "mode": "good", "window": -1},
    ]
    assert specs[3].label == "toy:bits=3:mode=good:window=-1"


def test_a_label_stands_for_its_configuration(site: Site) -> None:
    site.toy()
    for spec in parse_method("toys:toy:bits=2,3:skip_layers=1,1+2"):
        assert parse_method(spec.label) == (spec,)
        assert get_method(spec.name, **spec.options).config()["bits"] == spec.options["bits"]


def test_a_value_may_hold_a_colon(site: Site, tmp_path: Path) -> None:
    site.toy()
    (spec,) = parse_method(r"toy:calibration=C:\kv\smol.safetensors:bits=2")
    assert spec.options == {"calibration": r"C:\kv\smol.safetensors", "bits": 2}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("toy:bit=2", "toy: unknown option 'bit'; did you mean 'bits'"),
        ("toy:bits=9", r"toy: bits must be an integer from 1 to 8 \(got '9'\)"),
        ("toy:bits=2,,3", r"toy: bits must be an integer from 1 to 8 \(got ''\)"),
        ("toy:bits=", r"toy: bits must be an integer from 1 to 8 \(got ''\)"),
        ("toy:bits=2:bits=3", "toy: bits is given twice"),
        ("toy:bits=2,2", "toy: bits has a value twice"),
        ("toy:bits", "toy: 'bits' has no value; write toy:bits=VALUE"),
        ("toy:", "does not read as METHOD"),
        ("toy=3", "does not read as METHOD"),
        ("a:b:c", "does not read as METHOD"),
        ("", "does not read as METHOD"),
    ],
)
def test_words_that_do_not_read_are_refused(site: Site, words: str, complaint: str) -> None:
    site.toy()
    with pytest.raises(ConfigError, match=complaint):
        parse_method(words)


def test_an_unknown_method_keeps_its_error(site: Site) -> None:
    with pytest.raises(UnknownMethod, match="no method named 'nobody:toy'"):
        parse_method("nobody:toy")


def test_a_class_without_declared_options_takes_none(site: Site) -> None:
    site.toy()
    site.module("toy_plugin_code", "class Toy:\n    name = 'toy'\n    def bind(self, layer): pass")
    assert parse_method("toy") == (MethodSpec("toy", {}, "toy"),)
    with pytest.raises(ConfigError, match=r"toy: unknown option 'bits'\. Options: none"):
        parse_method("toy:bits=3")
