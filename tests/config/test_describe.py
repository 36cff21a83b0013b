from __future__ import annotations

from typing import Any, ClassVar

import pytest
from attrs import frozen
from hypothesis import find, given

from kvcompress.config import (
    choice,
    config_strategy,
    construct,
    illegal,
    integer,
    markdown_table,
    options_of,
)
from kvcompress.errors import ConfigError
from tests.config.toy_options import Toy


@frozen(kw_only=True)
class Base:
    name: ClassVar[str] = "example"
    window: int = integer(128, help="Exact tokens.")


@frozen(kw_only=True)
class Example(Base):
    dim: int = integer(8, choices=(2, 4, 8), help="Values coded together.")
    mode: str = choice("a|b", ("a|b", "c"), "How.")
    codes: int = integer(16, low=2, high=64, help="Size of the codebook.")

    def __attrs_post_init__(self) -> None:
        if self.codes < self.dim:
            raise illegal(self, "codes", f"at least dim={self.dim}")


def test_a_class_s_own_options_come_first_and_know_their_names() -> None:
    assert [option.name for option in options_of(Example)] == ["dim", "mode", "codes", "window"]
    assert options_of(int) == ()


def test_an_unknown_option_is_named_with_what_is_near_and_what_exists() -> None:
    with pytest.raises(ConfigError) as caught:
        construct(Example, {"dims": 4})
    assert str(caught.value) == (
        "example: unknown option 'dims'; did you mean 'dim'? Options: dim, mode, codes, window"
    )
    with pytest.raises(ConfigError, match=r"example: unknown option 'zzz'\. Options: dim"):
        construct(Example, {"zzz": 4})


def test_plain_classes_are_made_too() -> None:
    class Plain:
        name = "plain"

        def __init__(self, size: int, depth: int = 1) -> None:
            self.size = size

    assert construct(Plain, {"size": 3}).size == 3
    with pytest.raises(ConfigError, match="plain: unknown option 'sizes'; did you mean 'size'"):
        construct(Plain, {"sizes": 3})
    with pytest.raises(ConfigError, match="plain: missing a required argument: 'size'"):
        construct(Plain, {})


def test_an_error_inside_the_class_is_not_taken_for_a_mistake_of_the_user() -> None:
    class Faulty:
        def __init__(self, **options: Any) -> None:
            raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        construct(Faulty, {"anything": 1})


@given(config_strategy(Example))
def test_drawn_configurations_are_legal_together(config: Example) -> None:
    assert config.codes >= config.dim


@given(config_strategy(Toy))
def test_every_kind_of_option_can_be_drawn(config: Toy) -> None:
    assert Toy(**{o.name: getattr(config, o.name) for o in options_of(Toy)}) == config


def test_drawn_configurations_reach_the_corners() -> None:
    found = find(config_strategy(Example), lambda c: c.codes == c.dim and c.mode == "c")
    assert (found.codes, found.mode) == (found.dim, "c")


def test_the_simplest_configuration_drawn_has_the_defaults() -> None:
    assert find(config_strategy(Example), lambda c: True).window == 128


def test_the_table_has_a_row_for_each_option() -> None:
    assert markdown_table(Example).splitlines() == [
        "| option | default | legal | meaning |",
        "|---|---|---|---|",
        "| `dim` | `8` | one of 2, 4, 8 | Values coded together. |",
        r"| `mode` | `'a\|b'` | one of 'a\|b', 'c' | How. |",
        "| `codes` | `16` | an integer from 2 to 64 | Size of the codebook. |",
        "| `window` | `128` | an integer | Exact tokens. |",
    ]
