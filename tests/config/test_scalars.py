from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import frozen
from hypothesis import find

from kvcompress.config import config_strategy, integer, number, options_of, to_json
from kvcompress.errors import ConfigError
from tests.config.toy_options import Toy


@pytest.mark.parametrize(
    "bad", [0, 9, -1, 4.0, 3.5, "4", None, True, float("nan"), float("inf"), np.float32(4), [4]]
)
def test_an_integer_takes_nothing_but_integers_in_range(bad: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Toy(bits=bad)
    assert str(caught.value) == f"Toy: bits must be an integer from 1 to 8 (got {bad!r})"


@pytest.mark.parametrize(
    ("option", "bad", "legal"),
    [
        ("dim", 3, "one of 2, 4, 8, 16"),
        ("dim", True, "one of 2, 4, 8, 16"),
        ("limit", -1, "an integer of at least 0, or None"),
        ("scale", 0.4, "a finite number of at least 0.5"),
        ("scale", float("inf"), "a finite number of at least 0.5"),
        ("scale", "1", "a finite number of at least 0.5"),
        ("scale", 10**400, "a finite number of at least 0.5"),
        ("beta", 1.01, "a finite number from 0 to 1"),
        ("beta", float("nan"), "a finite number from 0 to 1"),
        ("beta", False, "a finite number from 0 to 1"),
        ("rope", "single", "one of 'banded', 'exact'"),
        ("rope", None, "one of 'banded', 'exact'"),
        ("whiten", 1, "true or false"),
        ("whiten", "true", "true or false"),
        ("label", b"x", "a text"),
        ("skip", -1, "an integer of at least 0, or a pair of such integers"),
        ("skip", (1, 2, 3), "an integer of at least 0, or a pair of such integers"),
        ("skip", (1, -2), "an integer of at least 0, or a pair of such integers"),
        ("skip", "1+2", "an integer of at least 0, or a pair of such integers"),
    ],
)
def test_an_illegal_value_is_refused_with_what_is_legal(option: str, bad: Any, legal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Toy(**{option: bad})
    assert str(caught.value).startswith(f"Toy: {option} must be {legal} (got ")


def test_values_take_their_normal_form() -> None:
    toy = Toy(bits=np.int64(3), scale=2, beta=np.float32(0.25), skip=3, limit=np.uint8(7))
    assert (toy.bits, type(toy.bits)) == (3, int)
    assert (toy.scale, type(toy.scale)) == (2.0, float)
    assert (toy.beta, type(toy.beta)) == (0.25, float)
    assert toy.skip == (3, 3)
    assert (toy.limit, type(toy.limit)) == (7, int)
    assert Toy(skip=[1, 2]).skip == (1, 2)
    assert Toy(limit=None).limit is None


def test_a_long_value_is_cut_short_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        Toy(bits="x" * 1000)
    assert len(str(caught.value)) < 150


def test_an_illegal_default_is_refused_when_it_is_declared() -> None:
    with pytest.raises(ConfigError, match=r"default must be an integer from 1 to 8 \(got 9\)"):
        integer(9, low=1, high=8, help="Bits.")


def test_minus_zero_is_zero() -> None:
    assert to_json(Toy(beta=-0.0)) == to_json(Toy(beta=0.0))


@frozen(kw_only=True)
class Rated:
    rate: float = number(2.0, choices=(1.0, 1.25, 2.0), help="Rate.")


@pytest.mark.parametrize("bad", [1.3, 0, float("nan"), "2", True, None])
def test_a_number_may_be_one_of_a_few(bad: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Rated(rate=bad)
    assert str(caught.value) == f"Rated: rate must be one of 1, 1.25, 2 (got {bad!r})"


def test_the_few_are_read_and_drawn() -> None:
    (option,) = options_of(Rated)
    assert [option.parse(word) for word in ("1", "1.25", "2.0")] == [1.0, 1.25, 2.0]
    assert type(Rated(rate=1).rate) is float
    with pytest.raises(ConfigError, match=r"one of 1, 1.25, 2 \(got '1.3'\)"):
        option.parse("1.3")
    drawn = {find(config_strategy(Rated), lambda c, r=rate: c.rate == r).rate for rate in (1, 1.25)}
    assert drawn == {1.0, 1.25}
