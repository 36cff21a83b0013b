"""Methods as words on a command line: ``turboquant:bits=2,3,4:window=64``."""

from __future__ import annotations

import itertools
import re
from typing import Any

from attrs import frozen

from kvcompress.config import options_of
from kvcompress.config.describe import unknown_option
from kvcompress.config.option import owner_name
from kvcompress.errors import ConfigError, UnknownMethod
from kvcompress.registry import list_methods, method_class

GRAMMAR = "METHOD[:OPTION=VALUE[,VALUE...]]..."

_SETTING = re.compile(r":(?=[A-Za-z_]\w*=)")
_METHOD = re.compile(r"[^:=\s]+(:[^:=\s]+)?")


@frozen
class MethodSpec:
    """One configuration of a method that a command line asked for.

    Attributes:
        name: The name to give to ``get_method``, with its distribution if one was written.
        options: The values that were written, by the option's name, read and checked.
        label: The words that stand for this configuration alone; they can be parsed again.
    """

    name: str
    options: dict[str, Any]
    label: str


def parse_method(words: str) -> tuple[MethodSpec, ...]:
    """Read ``METHOD[:OPTION=VALUE[,VALUE...]]...``; several values of an option make a grid.

    ``METHOD`` may be ``DISTRIBUTION:NAME``. The option ``calibration`` takes the path of a
    calibration file. A value holds no comma, and no ``:`` that is followed by ``word=``.

    Returns:
        One configuration for each combination of values, the last option varying fastest.

    Raises:
        ConfigError: The words do not follow the grammar, or an option is unknown or not legal.
        KVCompressError: As :func:`kvcompress.registry.method_class`.
    """
    head, *settings = _SETTING.split(words)
    if not _METHOD.fullmatch(head):
        raise ConfigError(f"{words!r} does not read as {GRAMMAR}")
    cls = _class_of(head)
    known = {option.name: option for option in options_of(cls)}
    grid: dict[str, list[tuple[str, Any]]] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name in grid:
            raise ConfigError(f"{owner_name(cls)}: {name} is given twice in {words!r}")
        values = text.split(",")
        if len(set(values)) < len(values):
            raise ConfigError(f"{owner_name(cls)}: {name} has a value twice in {words!r}")
        if name in known:
            parse = known[name].parse
            grid[name] = [(value, parse(value, owner=owner_name(cls))) for value in values]
        elif name == "calibration":
            grid[name] = [(value, value) for value in values]
        else:
            raise unknown_option(owner_name(cls), name, known)
    return tuple(
        MethodSpec(
            name=head,
            options={name: value for name, (_, value) in zip(grid, cell, strict=True)},
            label=":".join(
                [head, *(f"{n}={text}" for n, (text, _) in zip(grid, cell, strict=True))]
            ),
        )
        for cell in itertools.product(*grid.values())
    )


def _class_of(head: str) -> type:
    try:
        return method_class(head)
    except UnknownMethod:
        method, _, option = head.partition(":")
        if option and any(row.name == method for row in list_methods()):
            raise ConfigError(
                f"{method}: {option!r} has no value; write {method}:{option}=VALUE"
            ) from None
        raise
