"""What a class's options are, for documentation, for tests and for making an instance."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from kvcompress.config.option import METADATA_KEY, Option, owner_name
from kvcompress.errors import ConfigError

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

T = TypeVar("T")


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the options that ``cls`` declares: its own first, then those it inherits."""
    if not attrs.has(cls):
        return ()
    fields = [field for field in attrs.fields(cls) if METADATA_KEY in field.metadata]
    fields.sort(key=lambda field: field.inherited)
    return tuple(attrs.evolve(field.metadata[METADATA_KEY], name=field.name) for field in fields)


def construct(cls: type[T], options: Mapping[str, Any], **extra: Any) -> T:
    """Make a ``cls`` from its options by name.

    Args:
        cls: The class of the configuration.
        options: Option values by name.
        **extra: Constructor arguments that are not options, such as ``calibration``.

    Raises:
        ConfigError: An option is unknown or not legal, or one that has no default is missing.
    """
    signature = inspect.signature(cls)
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        for name in options:
            known = [option.name for option in options_of(cls)] or list(signature.parameters)
            if name not in known:
                raise unknown_option(owner_name(cls), name, known)
    try:
        signature.bind(**options, **extra)
    except TypeError as error:
        raise ConfigError(f"{owner_name(cls)}: {error}") from error
    return cls(**options, **extra)


def unknown_option(owner: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error of an option that does not exist; the caller raises it."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ConfigError(
        f"{owner}: unknown option {name!r}{hint} Options: {', '.join(known) or 'none'}"
    )


def config_strategy(cls: type[T]) -> SearchStrategy[T]:
    """Return a Hypothesis strategy for whole configurations of ``cls``.

    Options are drawn one by one or left at their default; combinations that the class refuses
    are not drawn.
    """
    from hypothesis import reject
    from hypothesis import strategies as st

    choices = st.fixed_dictionaries(
        {}, optional={option.name: option.strategy() for option in options_of(cls)}
    )

    @st.composite
    def configurations(draw: DrawFn) -> T:
        try:
            return construct(cls, draw(choices))
        except ConfigError:
            reject()

    return configurations()


def markdown_table(cls: type) -> str:
    """Return the options of ``cls`` as a Markdown table, one row each."""
    rows = ["| option | default | legal | meaning |", "|---|---|---|---|"]
    for option in options_of(cls):
        cells = (f"`{option.name}`", f"`{option.default!r}`", option.legal, option.help)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)
