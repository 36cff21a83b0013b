"""The tables of ``benchmarks/peers.py``, for ``generate.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import frozen

from kvcompress.compare.render import piped

OURS = "kvcompress "
REFERENCE = "mlx-lm KVCache float32"

Row = Mapping[str, Any]


@frozen
class Cell:
    """One number of a row.

    Attributes:
        title: The column's heading.
        name: What the report calls it.
        form: How it is written.
        unit: What it is divided by.
        more_is_better: What counts as better; nothing does where this is ``None``.
    """

    title: str
    name: str
    form: str = "{:.1f}"
    unit: float = 1
    more_is_better: bool | None = False

    def value(self, row: Row) -> float | None:
        """The number; a median where it is a time."""
        times = row["times"].get(self.name)
        value: float | None = times[0] if times else row["measures"].get(self.name)
        return value

    def text(self, row: Row) -> str:
        """The number as a table has it."""
        value = self.value(row)
        return "-" if value is None else self.form.format(value / self.unit)

    def rank(self, row: Row) -> float | None:
        """What rows are compared by: of a time its ratio, since a machine is not always as fast."""
        ratio = row["ratios"].get(self.name)
        return ratio[0] if ratio else self.value(row)

    def better(self, one: float, other: float) -> bool:
        """Whether a number beats another."""
        return one > other if self.more_is_better else one < other


SIZES = (
    Cell("bits", "bits_per_value", more_is_better=None),
    Cell("with tables", "bits_per_value_with_tables", more_is_better=None),
    Cell("coded", "coded_bits", "{:.2f}", more_is_better=None),
    Cell("MB", "resident_bytes", unit=1e6),
    Cell("active MB", "active_bytes", unit=1e6),
    Cell("with tables", "active_bytes_with_tables", unit=1e6, more_is_better=None),
    Cell("peak MB", "peak_bytes_with_tables", unit=1e6),
    Cell("KL", "kl", "{:.4f}"),
    Cell("top-1", "top1", "{:.0%}", more_is_better=True),
    Cell("recall", "retrieval_recall", "{:.0%}", more_is_better=True),
    Cell("copy", "retrieval_copy", "{:.0%}", more_is_better=True),
)
TIMES = (
    Cell("step, ms", "step_ms"),
    Cell("attention, ms", "attention_ms"),
    Cell("read, tokens/s", "prefill_tokens_per_second", "{:.0f}", more_is_better=True),
    Cell("encode, µs a token", "encode_us_per_token", "{:.0f}"),
)


def peers(data: dict[str, Any]) -> str:
    """All that a report of ``benchmarks/peers.py`` has to tell, context by context."""
    parts = [_conditions(data)]
    for run in data["runs"]:
        protocol = run["protocol"]
        parts += [
            f"### {protocol['context']:,} tokens of context",
            _size_table(run),
            _time_table(run),
            "\n".join(_failures(run)),
            f"**Better than every row of kvcompress at no more bits kept, {protocol['context']:,} "
            "tokens:**",
            "\n".join(_ahead(run, SIZES[0])) or "- no cell",
            "**The same at no more bits of a coded number, kept or not:**",
            "\n".join(_ahead(run, SIZES[2])) or "- no cell",
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _conditions(data: dict[str, Any]) -> str:
    settings, runs = data["settings"], data["runs"]
    subject = next((run["subject"] for run in runs if run["subject"]), None)
    packages = {
        row["package"]: row["version"] for run in runs for row in run["rows"] if row["package"]
    }
    versions = [f"{name} {version}" for name, version in (settings["versions"] | packages).items()]
    about = (
        f"{subject['model']['name']} ({subject['model']['dtype']}) on {settings['text']}, "
        if subject
        else ""
    )
    return (
        f"Measured with {about}{settings['cores']} cores, OpenBLAS threads: "
        f"{settings['threads']}. {', '.join(versions)}."
    )


def _size_table(run: Row) -> str:
    protocol = run["protocol"]
    windows = "window" if protocol["windows"] == 1 else "windows"
    lines = [
        f"What is kept and what it costs in quality: {protocol['context']:,} tokens read, "
        f"{protocol['scored']} scored, {protocol['windows']} {windows}.",
        "",
        *_head([cell.title for cell in SIZES]),
    ]
    for row in run["rows"]:
        cells = [cell.text(row) for cell in SIZES]
        error = row["measures"].get("kl_se")
        if error:
            cells[7] += f" ±{error:.4f}"
        lines.append(piped([_name(row), *cells]))
    return "\n".join(lines)


def _time_table(run: Row) -> str:
    speed = run["read_bytes_per_second"]
    lines = [
        "What it costs in time: medians, and in brackets the ratio to the first row in the same "
        "round, median and range of the rounds; more is better for reading. *x limit*: how many "
        f"times longer than reading the bytes takes that must be read, at the {speed / 1e9:.1f} "
        "GB/s that the machine reads; weights and cache for a step, the cache for attention.",
        "",
        *_head(["rounds", *_time_titles()]),
    ]
    for row in run["rows"]:
        cells = [str(len(row["rounds"]) or "-")]
        for cell in TIMES:
            cells.append(_timed(cell, row))
            if cell.name in LIMITS:
                cells.append(_over_limit(cell, row, run))
        lines.append(piped([_name(row), *cells]))
    return "\n".join(lines)


def _time_titles() -> Iterator[str]:
    for cell in TIMES:
        yield cell.title
        if cell.name in LIMITS:
            yield "x limit"


def _timed(cell: Cell, row: Row) -> str:
    ratio = row["ratios"].get(cell.name)
    if not ratio:
        return cell.text(row)
    middle, low, high = ratio
    return f"{cell.text(row)} ({middle:.2f}: {low:.2f} to {high:.2f})"


def limit_ms(row: Row, run: Row, *, weights: bool) -> float | None:
    """Milliseconds to read what a step must read, at the speed at which memory was read.

    Args:
        row: Whose cache it is.
        run: Its run.
        weights: A whole step, which reads the model's weights too.
    """
    held, subject = row["times"].get("held_bytes"), run["subject"]
    if not held or not subject or not run["read_bytes_per_second"]:
        return None
    size = held[0] + (row["measures"].get("table_bytes") or 0)
    size += subject["weight_bytes"] if weights else 0
    return float(1e3 * size / run["read_bytes_per_second"])


LIMITS: Mapping[str, Callable[[Row, Row], float | None]] = {
    "step_ms": lambda row, run: limit_ms(row, run, weights=True),
    "attention_ms": lambda row, run: limit_ms(row, run, weights=False),
}
"""The least that a time could be."""


def _over_limit(cell: Cell, row: Row, run: Row) -> str:
    value, limit = cell.value(row), LIMITS[cell.name](row, run)
    return f"{value / limit:.1f}" if value and limit else "-"


def _failures(run: Row) -> Iterator[str]:
    for row in run["rows"]:
        for part, error in row["errors"].items():
            yield f"- `{row['row']}` failed ({part}): {error}"
        if row["note"]:
            yield f"- `{row['row']}`: {row['note']}."


def _ahead(run: Row, bits: Cell) -> Iterator[str]:
    """Cells in which a row beats each of kvcompress that keeps no more bits than it.

    Args:
        run: The rows.
        bits: What counts as bits; rows that do not say are left out.
    """
    sized = [(row, size) for row in run["rows"] if (size := bits.value(row)) is not None]
    ours = [(row, size) for row, size in sized if row["row"].startswith(OURS)]
    for row, size in sized:
        if row["row"].startswith((OURS, REFERENCE)):
            continue
        rivals = [rival for rival, other in ours if other <= size]
        won = [text for cell in (*SIZES, *TIMES) if (text := _won(cell, row, rivals))]
        none = " (nothing of kvcompress is as small)" if not rivals else ""
        if won:
            yield f"- `{row['row']}`, {bits.text(row)} bits{none}: {'; '.join(won)}"


def _won(cell: Cell, row: Row, rivals: list[Row]) -> str:
    """What a row has in a cell if it is better than all rivals there."""
    value = cell.rank(row)
    if value is None or cell.more_is_better is None:
        return ""
    known = [(other, rival) for rival in rivals if (other := cell.rank(rival)) is not None]
    if not all(cell.better(value, other) for other, _ in known):
        return ""
    if not known:
        return f"{cell.title} {cell.text(row)}"
    pick = max if cell.more_is_better else min
    _, best = pick(known, key=lambda pair: pair[0])
    return f"{cell.title} {cell.text(row)} (`{best['row'].removeprefix(OURS)}`: {cell.text(best)})"


def _head(titles: list[str]) -> list[str]:
    return [piped(["row", *titles]), piped(["---", *["---:"] * len(titles)])]


def _name(row: Row) -> str:
    return f"`{row['row']}`"
