"""A comparison of scores as text: tables for a terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from kvcompress.compare.columns import MISSING
from kvcompress.compare.render import piped
from kvcompress.compare.score_report import ScoreReport, ScoreRow

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS: Final[Mapping[str, str]] = {
    "all": "all",
    "recent": "recent",
    "older": "older",
    "ratio": "x exact RoPE",
    "exact_rope": "exact RoPE",
    "key_error": "keys",
}
"""Heading of each measure that is shown."""

_ABOUT: Final[Mapping[str, str]] = {
    "local_recency": "made-up keys; the query asks for the last tokens",
    "long_range_dependent": "made-up keys; the query asks for the first tokens",
}


def print_table(report: ScoreReport, console: Console) -> None:
    """Print a table for each workload, what went wrong, and the legend."""
    from rich.table import Table
    from rich.text import Text

    for workload, rows in _by_workload(report).items():
        table = Table(title=title(report, workload), title_justify="left", box=None, pad_edge=False)
        for place, heading in enumerate(("tokens", "method", *COLUMNS.values())):
            table.add_column(heading, justify="left" if place == 1 else "right")
        for row in rows:
            style = "red" if row.error else None
            table.add_row(str(row.tokens), Text(row.method), *_cells(row), style=style)
        console.print(table)
        console.print()
    for line in _failures(report):
        console.print(Text(line, style="red"))
    for line in legend(report):
        console.print(Text(line))


def markdown(report: ScoreReport) -> str:
    """The tables as Markdown, with titles and legend."""
    lines = []
    for workload, rows in _by_workload(report).items():
        head = ("tokens", "method", *COLUMNS.values())
        rule = ("---:", "---", *("---:" for _ in COLUMNS))
        lines += [f"**{title(report, workload)}**", "", piped(head), piped(rule)]
        lines += [piped([str(row.tokens), f"`{row.method}`", *_cells(row)]) for row in rows]
        lines.append("")
    lines += [f"- {line}" for line in (*_failures(report), *legend(report))]
    return "\n".join(lines) + "\n"


def csv_text(report: ScoreReport) -> str:
    """Every measure of every row in full, one line a row."""
    names = dict.fromkeys(name for row in report.rows for name in row.measures)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["workload", "tokens", "method", "error", *names])
    for row in report.rows:
        cells = (row.measures.get(name) for name in names)
        values = ("" if cell is None else cell for cell in cells)
        writer.writerow([row.workload, row.tokens, row.method, row.error, *values])
    return out.getvalue()


def title(report: ScoreReport, workload: str) -> str:
    """One line on what a table shows."""
    about = report.provenance["workloads"][workload]
    if workload in _ABOUT:
        return f"{workload}: {_ABOUT[workload]}; means over {len(about['seeds'])} seeds"
    model = about["model"]
    return (
        f"{workload}: keys and queries of {model['name']} ({model['dtype']}) on "
        f"{about['text']['name']}, tables fitted to {about['fitted_to']['name']}; means over layers"
    )


def legend(report: ScoreReport) -> Iterator[str]:
    """What the columns mean."""
    yield (
        "Mean squared errors of attention's scores, q k / sqrt(D), against un-quantised keys with "
        "exact RoPE: of all tokens, of the recent ones (the last 16, exact in the cache), of the "
        "older ones."
    )
    yield (
        "exact RoPE: the error of all scores if the same codes were decoded and rotated to their "
        "true positions; 'x exact RoPE' is how many times larger the error is."
    )
    yield "keys: mean squared error of a channel of the coded keys, however queries weigh it."
    if set(_ABOUT) & set(report.provenance["workloads"]):
        yield (
            "Made-up keys point everywhere alike, which no model's do: they show what a rope "
            "policy costs, not which one suits a model. See workload recorded for that."
        )


def _by_workload(report: ScoreReport) -> dict[str, list[ScoreRow]]:
    rows: dict[str, list[ScoreRow]] = {}
    for row in report.rows:
        rows.setdefault(row.workload, []).append(row)
    return rows


def _cells(row: ScoreRow) -> list[str]:
    return [_shown(name, row.measures.get(name)) for name in COLUMNS]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return MISSING
    if name == "ratio":
        return f"{value:.2f}"
    return f"{value:#.3g}" if value else "0"


def _failures(report: ScoreReport) -> Iterator[str]:
    """One line for each error, however many rows it took."""
    yield from dict.fromkeys(f"{row.method} failed: {row.error}" for row in report.failed)


TEXT_FORMATS: Final[Mapping[str, Callable[[ScoreReport], str]]] = {
    "md": markdown,
    "csv": csv_text,
    "json": ScoreReport.to_json,
}
"""The formats that are plain text, by name."""
