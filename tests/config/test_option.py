from __future__ import annotations

from typing import Any, ClassVar

import pytest
from attrs import frozen

from kvcompress.config import illegal, options_of
from kvcompress.errors import ConfigError
from tests.config.toy_options import Toy

OPTIONS = {option.name: option for option in options_of(Toy)}


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("bits", "3", 3),
        ("window", "-1", -1),
        ("limit", "none", None),
        ("limit", "5", 5),
        ("scale", "1e3", 1000.0),
        ("rope", "exact", "exact"),
        ("whiten", "False", False),
        ("label", "a b", "a b"),
        ("skip", "2", (2, 2)),
        ("skip", "1+2", (1, 2)),
    ],
)
def test_words_are_read(name: str, words: str, value: Any) -> None:
    assert OPTIONS[name].parse(words) == value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bits", "9"),
        ("bits", "3.0"),
        ("bits", ""),
        ("bits", "none"),
        ("scale", "nan"),
        ("scale", "fast"),
        ("rope", "Exact"),
        ("whiten", "1"),
        ("skip", "1+2+3"),
        ("skip", "1+"),
    ],
)
def test_words_that_stand_for_nothing_legal_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OPTIONS[name].parse(words, owner="toy")
    assert str(caught.value) == f"toy: {name} must be {OPTIONS[name].legal} (got {words!r})"


def test_errors_carry_the_name_of_the_method() -> None:
    @frozen(kw_only=True)
    class Named(Toy):
        name: ClassVar[str] = "turboquant"

    with pytest.raises(ConfigError, match=r"^turboquant: bits must be .* \(got 9\)$"):
        Named(bits=9)
    error = illegal(Named(bits=3), "bits", "even")
    assert str(error) == "turboquant: bits must be even (got 3)"


def test_a_value_that_cannot_be_shown_is_refused_by_its_type() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(ConfigError, match=r"bits must be .* \(got a Broken that cannot be shown\)"):
        Toy(bits=Broken())  # type: ignore[arg-type]
