"""The columns of a report, each with its heading, its format and its meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import frozen

from kvcompress.compare.report import Report, Row

MISSING: Final = "-"
"""What stands for a number that was not measured."""


@frozen
class Column:
    """One column.

    Attributes:
        title: Heading.
        measure: Name of the measure or reading.
        show: Turns the number into text.
        error: Name of the measure that is the number's standard error, if any.
    """

    title: str
    measure: str
    show: Callable[[float], str]
    error: str = ""

    def cell(self, row: Row) -> str:
        """The text of a row's cell."""
        value = row.value(self.measure)
        if value is None:
            return MISSING
        text = self.show(value)
        spread = row.value(self.error) if self.error else None
        return text if not spread else f"{text} ±{self.show(spread).lstrip('+')}"


def _decimals(places: int, sign: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:{sign}.{places}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.1f}"


def _times(value: float) -> str:
    return f"{value:.1f}x"


COLUMNS: Final = (
    Column("bits", "bits_per_value", _decimals(1)),
    Column("coded", "coded_bits_per_value", _decimals(2)),
    Column("MB", "resident_bytes", _megabytes),
    Column("smaller", "times_smaller", _times),
    Column("peak MB", "peak_bytes", _megabytes),
    Column("KL", "kl", _decimals(4), "kl_se"),
    Column("ΔNLL", "nll_change", _decimals(3, "+"), "nll_change_se"),
    Column("top-1", "top1", _percent),
    Column("recall", "retrieval_recall", _percent),
    Column("copy", "retrieval_copy", _percent),
)

TOKENS_A_SECOND: Final = Column("tok/s", "decode_tokens_per_second", _decimals(1))


def columns_of(report: Report) -> tuple[Column, ...]:
    """The standing columns and those of the metrics and workloads that plugins added.

    Without the time of a token where no row has one: a protocol may leave it out.
    """
    timed = any(row.value(TOKENS_A_SECOND.measure) is not None for row in report.rows)
    standing = (*COLUMNS, TOKENS_A_SECOND) if timed else COLUMNS
    added = tuple(
        Column(about["title"], name, _decimals(4)) for name, about in report.added.items()
    )
    return (*standing, *added)
