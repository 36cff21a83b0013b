"""``kvcompress compare``: methods side by side on a real model."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvcompress.compare import Protocol, Report

SUFFIXES = {".md": "md", ".csv": "csv", ".json": "json", ".txt": "table"}
"""Formats by the suffix of the file they go to."""


def compare(
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD[:OPTION=VALUE]...",
            help="A method to measure, beside the yardsticks; may be given several times. "
            "Several values make several rows: turboquant:bits=2,3,4.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="smollm2-135m (fetched once), a folder, or a hub name.")
    ] = "smollm2-135m",
    dtype: Annotated[
        str | None, typer.Option(help="Cast the model to float32, float16 or bfloat16.")
    ] = None,
    text: Annotated[
        str, typer.Option(help="prose-eval, code-eval, a file or a folder.")
    ] = "prose-eval",
    protocol: Annotated[str, typer.Option(help="quick or standard.")] = "quick",
    context: Annotated[
        int | None, typer.Option(help="Tokens read before the first scored one.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A calibration file, for the methods that take one; made where the embedded model "
            "lacks it."
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="table, md, csv or json; table on a terminal, else md."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the result to this file instead of stdout.")
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write the full report as JSON, too.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a row counts as hung.")
    ] = 3600.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw quality against memory into this file.")
    ] = None,
) -> None:
    """Measure methods on a real model: quality, memory, speed; one process a row.

    Exits with status 1 if a row failed.
    """
    from kvcompress.compare import DEFAULT_METHODS
    from kvcompress.compare import compare as run
    from kvcompress.compare.plot import require_matplotlib, save_plot
    from kvcompress.compare.progress import Progress

    shape = _format(format_, out)
    if plot is not None:
        require_matplotlib()  # before the work, not after it
    for path in (out, json_, plot):
        if path is not None:
            _must_be_writable(path)
    report = run(
        method or DEFAULT_METHODS,
        model=model,
        dtype=dtype,
        text=text,
        protocol=_protocol(protocol, context),
        calibration=None if calibration is None else str(calibration),
        row_seconds=timeout,
        command=shlex.join(["kvcompress", *sys.argv[1:]]),
        observer=Progress(),
    )
    _deliver(report, shape, out)
    if json_ is not None:
        json_.write_text(report.to_json(), encoding="utf-8")
    if plot is not None:
        save_plot(report, plot)
    if report.failed:
        raise typer.Exit(1)


def _format(asked: str | None, out: Path | None) -> str:
    from kvcompress.compare.render import TEXT_FORMATS
    from kvcompress.errors import ConfigError

    legal = ("table", *TEXT_FORMATS)
    if asked is None and out is not None:
        return SUFFIXES.get(out.suffix.lower(), "md")
    if asked is None:
        return "table" if sys.stdout.isatty() else "md"
    if asked not in legal:
        raise ConfigError(f"compare: --format must be one of {', '.join(legal)} (got {asked!r})")
    return asked


def _protocol(name: str, context: int | None) -> Protocol:
    import attrs

    from kvcompress.compare.protocol import PROTOCOLS
    from kvcompress.errors import ConfigError

    if name not in PROTOCOLS:
        raise ConfigError(
            f"compare: --protocol must be one of {', '.join(PROTOCOLS)} (got {name!r})"
        )
    chosen = PROTOCOLS[name]
    return chosen if context is None else attrs.evolve(chosen, context=context)


def _must_be_writable(path: Path) -> None:
    from kvcompress.errors import ConfigError

    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"compare: {path} is not a file that can be written")


def _deliver(report: Report, shape: str, out: Path | None) -> None:
    from rich.console import Console

    from kvcompress.compare.render import TEXT_FORMATS, print_table

    if out is None:
        if shape == "table":
            print_table(report, Console(width=None if sys.stdout.isatty() else 160))
        else:
            sys.stdout.write(TEXT_FORMATS[shape](report))
        return
    with out.open("w", encoding="utf-8") as file:
        if shape == "table":
            print_table(report, Console(file=file, width=160))
        else:
            file.write(TEXT_FORMATS[shape](report))
