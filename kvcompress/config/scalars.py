"""Options that are numbers, words and truth values."""

# ruff: noqa: A002 (`help` is what every option parser calls it)

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from attrs import frozen

from kvcompress.config.option import Option, option_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


@frozen(kw_only=True)
class _Integer(Option):
    low: int | None = None
    high: int | None = None
    choices: tuple[int, ...] = ()

    def _kind(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        return f"an integer{_range(self.low, self.high)}"

    def _accept(self, value: Any) -> int:
        # NumPy's integers count as Integral; bool does too, and is never meant.
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError("not an integer")
        whole = int(value)
        if self.choices and whole not in self.choices:
            raise ValueError("not one of the choices")
        if not _within(whole, self.low, self.high):
            raise ValueError("out of range")
        return whole

    def _read(self, text: str) -> int:
        return int(text)

    def _draw(self) -> SearchStrategy[int]:
        from hypothesis import strategies as st

        if self.choices:
            return st.sampled_from(self.choices)
        return st.integers(self.low, self.high)


@frozen(kw_only=True)
class _Pair(_Integer):
    def _kind(self) -> str:
        return f"{super()._kind()}, or a pair of such integers"

    def _accept(self, value: Any) -> Any:
        if not isinstance(value, tuple | list):
            whole = super()._accept(value)
            return (whole, whole)
        first, last = value
        return (super()._accept(first), super()._accept(last))

    def _read(self, text: str) -> Any:
        parts = [super(_Pair, self)._read(part) for part in text.split("+")]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def encode(self, value: Any) -> Any:
        return value if value is None else list(value)

    def _draw(self) -> SearchStrategy[Any]:
        from hypothesis import strategies as st

        return st.tuples(super()._draw(), super()._draw())


@frozen(kw_only=True)
class _Number(Option):
    low: float | None = None
    high: float | None = None
    choices: tuple[float, ...] = ()

    def _kind(self) -> str:
        if self.choices:
            return f"one of {', '.join(f'{choice:g}' for choice in self.choices)}"
        return f"a finite number{_range(self.low, self.high)}"

    def _accept(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError("not a number")
        real = float(value) + 0.0  # -0.0 is 0.0, and would have another fingerprint
        if self.choices and real not in self.choices:
            raise ValueError("not one of the choices")
        if not math.isfinite(real) or not _within(real, self.low, self.high):
            raise ValueError("out of range")
        return real

    def _read(self, text: str) -> float:
        return float(text)

    def _draw(self) -> SearchStrategy[float]:
        from hypothesis import strategies as st

        if self.choices:
            return st.sampled_from(self.choices)
        return st.floats(self.low, self.high, allow_nan=False, allow_infinity=False)


@frozen(kw_only=True)
class _Choice(Option):
    words: tuple[str, ...]

    def _kind(self) -> str:
        return f"one of {', '.join(map(repr, self.words))}"

    def _accept(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError("not one of the choices")
        return str(value)

    def _read(self, text: str) -> str:
        return text

    def _draw(self) -> SearchStrategy[str]:
        from hypothesis import strategies as st

        return st.sampled_from(self.words)


@frozen(kw_only=True)
class _Boolean(Option):
    def _kind(self) -> str:
        return "true or false"

    def _accept(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError("not a truth value")
        return value

    def _read(self, text: str) -> bool:
        values = {"true": True, "false": False}
        if text.lower() not in values:
            raise ValueError("neither true nor false")
        return values[text.lower()]

    def _draw(self) -> SearchStrategy[bool]:
        from hypothesis import strategies as st

        return st.booleans()


@frozen(kw_only=True)
class _Text(Option):
    def _kind(self) -> str:
        return "a text"

    def _accept(self, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError("not a text")
        return str(value)

    def _read(self, text: str) -> str:
        return text

    def _draw(self) -> SearchStrategy[str]:
        from hypothesis import strategies as st

        return st.text(max_size=20)


def integer(
    default: int | None,
    *,
    low: int | None = None,
    high: int | None = None,
    choices: Sequence[int] = (),
    optional: bool = False,
    help: str,
) -> Any:
    """Declare an integer in ``[low, high]``, or one of ``choices``."""
    return option_field(
        _Integer(
            default=default,
            low=low,
            high=high,
            choices=tuple(choices),
            optional=optional,
            help=help,
        )
    )


def pair(
    default: int | tuple[int, int],
    *,
    low: int | None = None,
    high: int | None = None,
    help: str,
) -> Any:
    """Declare two integers: ``n`` stands for ``(n, n)``, and the text ``1+2`` for ``(1, 2)``."""
    return option_field(_Pair(default=default, low=low, high=high, help=help))


def number(
    default: float | None,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[float] = (),
    optional: bool = False,
    help: str,
) -> Any:
    """Declare a finite real number in ``[low, high]``, or one of ``choices``, kept as a float."""
    return option_field(
        _Number(
            default=default,
            low=low,
            high=high,
            choices=tuple(choices),
            optional=optional,
            help=help,
        )
    )


def fraction(default: float | None, help: str, *, optional: bool = False) -> Any:
    """Declare a number from 0 to 1."""
    return number(default, low=0, high=1, optional=optional, help=help)


def choice(
    default: str | None,
    choices: Sequence[str],
    help: str,
    *,
    optional: bool = False,
) -> Any:
    """Declare one word out of ``choices``."""
    return option_field(
        _Choice(default=default, words=tuple(choices), optional=optional, help=help)
    )


def boolean(default: bool | None, help: str, *, optional: bool = False) -> Any:
    """Declare a truth value."""
    return option_field(_Boolean(default=default, optional=optional, help=help))


def text(default: str | None, help: str, *, optional: bool = False) -> Any:
    """Declare a free text."""
    return option_field(_Text(default=default, optional=optional, help=help))
