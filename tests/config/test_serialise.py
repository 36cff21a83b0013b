from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given

from kvcompress.config import array, config_strategy, from_json, integer, to_json
from kvcompress.errors import ConfigError
from tests.config.toy_options import Toy


@frozen(kw_only=True)
class Coded:
    bits: int = integer(4, low=1, high=8, help="Bits.")
    codebook: Any = array("The codebook.")


@given(config_strategy(Toy))
def test_json_brings_back_an_equal_configuration(config: Toy) -> None:
    assert from_json(Toy, to_json(config)) == config


def test_the_text_is_canonical() -> None:
    assert to_json(Coded(bits=3)) == '{"bits":3,"codebook":null}'
    assert to_json(Toy(scale=2)) == to_json(Toy(scale=2.0))


def test_what_is_left_out_takes_its_default() -> None:
    assert from_json(Toy, '{"bits": 3}') == Toy(bits=3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "the configuration is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"bit": 3}', "unknown option 'bit'; did you mean 'bits'?"),
        ('{"bits": 9}', r"bits must be an integer from 1 to 8 \(got 9\)"),
        ('{"bits": 3.0}', r"bits must be an integer from 1 to 8 \(got 3.0\)"),
        ('{"scale": NaN}', "scale must be a finite number"),
    ],
)
def test_foreign_text_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^Toy: .*{complaint}"):
        from_json(Toy, text)


def test_an_array_comes_back_only_as_the_array_that_was_stored() -> None:
    made = Coded(codebook=np.eye(2))
    stored = to_json(made)
    assert json.loads(stored)["codebook"]["shape"] == [2, 2]
    assert from_json(Coded, stored, {"codebook": np.eye(2)}) == made
    with pytest.raises(ConfigError, match="codebook is not the array that was stored"):
        from_json(Coded, stored, {"codebook": 2 * np.eye(2)})
    with pytest.raises(ConfigError, match="codebook is stored by its digest only"):
        from_json(Coded, stored)
