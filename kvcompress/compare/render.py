"""A report as text: a table for a terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvcompress.compare.columns import TOKENS_A_SECOND, Column, columns_of
from kvcompress.compare.report import Report

if TYPE_CHECKING:
    from rich.console import Console

_EXACT_BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16}


def print_table(report: Report, console: Console) -> None:
    """Print the table, what went wrong, and the legend."""
    from rich.table import Table
    from rich.text import Text

    columns = columns_of(report)
    table = Table("method", title=title(report), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="right")
    for row in report.rows:
        if not row.error:
            table.add_row(Text(row.method), *(Text(column.cell(row)) for column in columns))
        else:
            table.add_row(Text(row.method), *("-" for _ in columns), style="red")
    console.print(table)
    for row in report.failed:
        console.print(Text(f"{row.method} failed: {row.error}", style="red"))
    console.print()
    for line in legend(report):
        console.print(Text(line))


def markdown(report: Report) -> str:
    """The table as Markdown, with title and legend."""
    lines = markdown_table(report, columns_of(report))
    lines += ["", *(f"- `{row.method}` failed: {row.error}" for row in report.failed)]
    lines += [f"- {line}" for line in legend(report)]
    return "\n".join(lines) + "\n"


def markdown_table(report: Report, columns: Sequence[Column]) -> list[str]:
    """The title and some columns of all rows, line by line."""
    head = ("method", *(column.title for column in columns))
    lines = [f"**{title(report)}**", "", piped(head), piped(["---", *["---:" for _ in columns]])]
    lines += [
        piped([f"`{row.method}`", *(column.cell(row) for column in columns)]) for row in report.rows
    ]
    return lines


def csv_text(report: Report) -> str:
    """Every measure of every row in full, one line a row."""
    names: dict[str, None] = {}
    for row in report.rows:
        names |= dict.fromkeys([*row.measures, *row.readings])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "error", *names])
    for row in report.rows:
        cells = (row.value(name) for name in names)
        writer.writerow([row.method, row.error, *("" if cell is None else cell for cell in cells)])
    return out.getvalue()


def title(report: Report) -> str:
    """One line on what was run."""
    model, text = report.provenance["model"], report.provenance["text"]
    protocol = report.provenance["protocol"]
    times = "once" if protocol["windows"] == 1 else f"{protocol['windows']} times"
    return (
        f"{model['name']} ({model['dtype']}) on {text['name']}: {times} {protocol['context']} "
        f"tokens read, then {protocol['scored']} scored"
    )


def legend(report: Report) -> Iterator[str]:
    """What the columns mean, for somebody who sees them for the first time."""
    full = report.rows[0]
    dtype = report.provenance["model"]["dtype"]
    without = report.provenance["without_retrieval"]
    tokens = full.value("tokens")
    yield (
        "KL is the number to trust: how far the predictions are from full precision (the first "
        "row), in nats a token; ± is one standard error. ΔNLL: loss gained on the text. top-1: "
        "same first choice."
    )
    yield (
        f"bits: all that is kept of {tokens} tokens, for each number of the cache; it falls "
        "towards 'coded', what a compressed token takes, as the context grows."
    )
    yield (
        f"Some first and last tokens stay exact, in the model's {dtype}: "
        f"{_EXACT_BITS.get(dtype, '?')} bits. 'smaller' compares MB with a float16 cache of the "
        f"same tokens{_full_precision_note(dtype)}."
    )
    yield "peak MB: the most that reading and scoring took beyond the model." + (
        " tok/s: one token at a time, at this length, on this machine."
        if TOKENS_A_SECOND in columns_of(report)
        else ""
    )
    fitted = report.provenance.get("calibration")
    if fitted and fitted["text"]:
        yield (
            f"Methods that need a calibration had one of {fitted['tokens']:,} tokens of "
            f"{fitted['text']['name']}."
        )
    if without:
        yield f"recall, copy: not measured ({without})."
    else:
        yield (
            f"recall, copy: of {full.value('retrieval_tokens')} tokens read, facts recalled and a "
            f"passage's tokens repeated; hold them against the first row, for a small model errs "
            f"by itself."
        )
    for about in report.added.values():
        yield f"{about['title']}: {about['help']}"


def _full_precision_note(dtype: str) -> str:
    if dtype != "float32":
        return ""
    return ", so full precision in float32 shows 0.5x"


def piped(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


TEXT_FORMATS: Final[Mapping[str, Callable[[Report], str]]] = {
    "md": markdown,
    "csv": csv_text,
    "json": Report.to_json,
}
"""The formats that are plain text, by name."""
