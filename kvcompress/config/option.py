"""What an option is, and how a declared option becomes a checked attrs field."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import attrs
from attrs import evolve, frozen

from kvcompress.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

METADATA_KEY = "kvcompress.option"

_LONGEST_VALUE_SHOWN = 60


@frozen(kw_only=True)
class Option(ABC):
    """One option: its default, what is legal, what it means.

    A kind of option implements the four underscored hooks below. They raise whatever they like for
    what is not legal; this class words the error.

    Attributes:
        default: The value when none is given.
        help: One sentence on what the option does.
        optional: Whether ``None`` is legal too (``none`` on a command line).
        name: The name of the field; filled in when the option is read from its class.
    """

    default: Any
    help: str
    optional: bool = False
    name: str = ""

    @property
    def legal(self) -> str:
        """What is legal, as it stands after "must be": ``an integer from 1 to 8``."""
        return f"{self._kind()}, or None" if self.optional else self._kind()

    def check(self, value: object, *, owner: str = "") -> Any:
        """Return ``value`` in its normal form.

        Raises:
            ConfigError: ``value`` is not legal. ``owner`` names whose option it is.
        """
        if value is None and self.optional:
            return None
        try:
            return self._accept(value)  # which calls methods of an object of any type
        except Exception as error:
            raise self._error(value, owner) from error

    def parse(self, text: str, *, owner: str = "") -> Any:
        """Return the value that ``text`` stands for on a command line.

        Raises:
            ConfigError: ``text`` stands for no legal value.
        """
        if self.optional and text.lower() == "none":
            return None
        try:
            return self._accept(self._read(text))
        except Exception as error:
            raise self._error(text, owner) from error

    def strategy(self) -> SearchStrategy[Any]:
        """Return a Hypothesis strategy that draws legal values."""
        from hypothesis import strategies as st

        return st.none() | self._draw() if self.optional else self._draw()

    def encode(self, value: Any) -> Any:
        """Return the JSON form of a legal value."""
        return value

    def decode(self, data: Any, *, owner: str = "") -> Any:
        """Return the value whose JSON form is ``data``."""
        return self.check(data, owner=owner)

    @property
    def comparison_key(self) -> Callable[[Any], Any] | None:
        """How attrs compares and hashes values of this kind, where ``==`` will not do."""
        return None

    @abstractmethod
    def _kind(self) -> str:
        """What is legal apart from ``None``."""

    @abstractmethod
    def _accept(self, value: Any) -> Any:
        """Return ``value`` in its normal form, or raise."""

    @abstractmethod
    def _read(self, text: str) -> Any:
        """Turn command-line text into a value for :meth:`_accept`, or raise."""

    @abstractmethod
    def _draw(self) -> SearchStrategy[Any]:
        """Return a strategy for the legal values apart from ``None``."""

    def _error(self, value: object, owner: str) -> ConfigError:
        prefix = f"{owner}: " if owner else ""
        return ConfigError(f"{prefix}{self.name} must be {self.legal} (got {shown(value)})")


def option_field(option: Option) -> Any:
    """Return the attrs field of a declared option.

    Raises:
        ConfigError: The default is not legal.
    """
    option = evolve(option, default=evolve(option, name="default").check(option.default))
    return attrs.field(
        default=option.default,
        converter=attrs.Converter(_checked, takes_self=True, takes_field=True),
        eq=option.comparison_key or True,
        metadata={METADATA_KEY: option},
    )


def illegal(config: object, option: str, legal: str) -> ConfigError:
    """Return the error of an option that does not fit the others; the caller raises it.

    Args:
        config: The object whose options were checked together.
        option: The name of the option to complain about.
        legal: What would be legal, as it stands after "must be".
    """
    value = shown(getattr(config, option))
    return ConfigError(f"{owner_name(type(config))}: {option} must be {legal} (got {value})")


def owner_name(cls: type) -> str:
    """Return the method's name, or the class's where it has none."""
    name = getattr(cls, "name", None)
    return name if isinstance(name, str) else cls.__name__


def shown(value: object) -> str:
    """Return ``value`` as an error shows it: on one line, of bounded length."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"an array of shape {shape}"
    try:
        line = " ".join(repr(value).split())
    except Exception:
        line = f"a {type(value).__name__} that cannot be shown"
    return line if len(line) <= _LONGEST_VALUE_SHOWN else f"{line[: _LONGEST_VALUE_SHOWN - 3]}..."


def _checked(value: object, config: object, field: attrs.Attribute[Any]) -> Any:
    option: Option = field.metadata[METADATA_KEY]
    return evolve(option, name=field.name).check(value, owner=owner_name(type(config)))
