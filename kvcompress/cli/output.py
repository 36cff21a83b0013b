"""Where a command's result goes, and in which format."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kvcompress.errors import ConfigError
from kvcompress.files import is_folder, takes_files

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

FORMATS: Final = ("table", "md", "csv", "json")
SUFFIXES: Final = {".md": "md", ".csv": "csv", ".json": "json", ".txt": "table"}
"""Formats by the suffix of the file they go to."""


def format_of(asked: str | None, out: Path | None) -> str:
    """The format that was asked for, or that the file or the terminal suggests.

    Raises:
        ConfigError: There is no such format.
    """
    if asked is None and out is not None:
        return SUFFIXES.get(out.suffix.lower(), "md")
    if asked is None:
        return "table" if sys.stdout.isatty() else "md"
    if asked not in FORMATS:
        raise ConfigError(f"compare: --format must be one of {', '.join(FORMATS)} (got {asked!r})")
    return asked


def must_be_writable(path: Path) -> None:
    """Make sure that a file can be written, before there is anything to write.

    Raises:
        ConfigError: It cannot.
    """
    if is_folder(path) or not takes_files(path.parent):
        raise ConfigError(f"compare: {path} is not a file that can be written")


def must_be_apart(files: Mapping[str, Path | None]) -> None:
    """Make sure that no file is written over by another.

    Args:
        files: Each option's file, if it has one.

    Raises:
        ConfigError: Two options name one file.
    """
    owners: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        first = owners.setdefault(path.resolve(), option)
        if first != option:
            raise ConfigError(f"compare: {first} and {option} must be two files (got {path} twice)")


def deliver(
    report: T,
    shape: str,
    out: Path | None,
    table: Callable[[T, Console], None],
    texts: Mapping[str, Callable[[T], str]],
) -> None:
    """Write a report to a file, or to stdout.

    Args:
        report: The report.
        shape: One of :data:`FORMATS`.
        out: The file; stdout without one.
        table: Prints a report as a table.
        texts: Make a text of it, by the format's name.
    """
    from rich.console import Console

    if out is None:
        if shape == "table":
            table(report, Console(width=None if sys.stdout.isatty() else 160))
        else:
            sys.stdout.write(texts[shape](report))
        return
    with out.open("w", encoding="utf-8") as file:
        if shape == "table":
            table(report, Console(file=file, width=160))
        else:
            file.write(texts[shape](report))
