"""``kvcompress estimate``: the memory of a cache before it is made."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress.cli.chosen import ModelName

if TYPE_CHECKING:
    from kvcompress.compare.estimate import Estimate

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = ("", "K", "M", "G", "T")


def estimate(
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD[:OPTION=VALUE]...", help="Methods, with options.")
    ],
    model: ModelName = "smollm2-135m",
    context: Annotated[int, typer.Option(help="Tokens of the sequence.")] = 8192,
    dtype: Annotated[
        str | None, typer.Option(help="Type of exact tokens: float32, float16 or bfloat16.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Room for the cache, as 8GB or 512MiB: show the largest context."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A calibration file, for the methods that take one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Tell how many bytes a cache will take. Only shapes count: no weight of the model is read."""
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()  # before anything imports mlx

    from kvcompress.compare.estimate import estimator_of
    from kvcompress.compare.methods import expand
    from kvcompress.compare.skeleton import skeleton

    room = None if memory is None else _bytes_of(memory)
    path = None if calibration is None else str(calibration)
    labels = [spec.label for spec in expand(methods, path)]
    bare = skeleton(model, dtype)
    rows: dict[str, Estimate] = {}
    largest: dict[str, int] = {}
    for label in labels:
        estimator = estimator_of(label, bare, path)
        rows[label] = estimator.at(context)
        if room is not None:
            largest[label] = estimator.largest_context(room)
    if as_json:
        _print_json(model, rows, largest)
    else:
        _print_table(rows, largest)


def _bytes_of(words: str) -> int:
    from kvcompress.errors import ConfigError

    match = _SIZE.fullmatch(words.strip())
    if not match:
        raise ConfigError(
            f"estimate: --memory must be a size such as 8GB or 512MiB (got {words!r})"
        )
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS.index(prefix.upper()))


def _print_json(model: str, rows: dict[str, Estimate], largest: dict[str, int]) -> None:
    import json

    import attrs

    out: list[dict[str, Any]] = []
    for label, row in rows.items():
        numbers = attrs.asdict(row)
        numbers |= {"total_bytes": row.total_bytes, "times_smaller": row.times_smaller}
        if label in largest:
            numbers["largest_context"] = largest[label]
        out.append({"method": label, "model": model, **numbers})
    print(json.dumps(out, indent=2))


def _print_table(rows: dict[str, Estimate], largest: dict[str, int]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvcompress.compare.estimate import MOST_TOKENS

    titles = ("keys", "values", "exact", "plain", "tables", "total", "float16", "smaller")
    table = Table("method", box=None, pad_edge=False)
    for title in (*titles, *(["largest context"] if largest else [])):
        table.add_column(title, justify="right")
    for label, row in rows.items():
        sizes = (
            row.key_bytes,
            row.value_bytes,
            row.exact_bytes,
            row.plain_bytes,
            row.table_bytes,
            row.total_bytes,
            row.fp16_bytes,
        )
        cells = [*(f"{size / 1e6:,.2f}" for size in sizes), f"{row.times_smaller:.2f}x"]
        if label in largest:
            tokens = largest[label]
            cells.append(f"{tokens:,}" if tokens < MOST_TOKENS else f"over {MOST_TOKENS:,}")
        table.add_row(Text(label), *cells)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(
        "\nMB for one sequence. exact: first and last tokens kept as they came, in the model's "
        "type (see --dtype).\nplain: layers left uncompressed. tables: shared by all sequences. "
        "smaller: float16 over all but the tables."
    )
