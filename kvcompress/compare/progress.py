"""How a comparison gets on, shown on stderr."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kvcompress.cli.told import told
from kvcompress.compare.report import Row
from kvcompress.compare.runner import Observer

if TYPE_CHECKING:
    from kvcompress.calibrate.contract import Progress as CalibrationProgress


class Progress(Observer):
    """A line for each row that is done; on a terminal, a spinner beside those being measured."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("")
        self._total = 0
        self._done = 0
        self._since: dict[str, float] = {}  # of the rows being measured

    def begin(self, labels: Sequence[str]) -> None:
        """Remember how many rows there will be."""
        self._total = len(labels)

    def calibrating(self) -> AbstractContextManager[CalibrationProgress | None]:
        """Show a bar for each step, if there is anything to do."""
        return told()

    def row_starts(self, label: str) -> None:
        """Show which rows are being measured."""
        self._since[label] = time.perf_counter()
        self._show()

    def row_ends(self, row: Row) -> None:
        """Say how the row went, with its divergence: a run that is cut short leaves that."""
        self._status.stop()
        self._done += 1
        seconds = time.perf_counter() - self._since.pop(row.method)
        kl = row.value("kl")
        how = row.error or f"{seconds:.0f} s" + ("" if kl is None else f", KL {kl:.4f}")
        style = "red" if row.error else "dim"
        self._console.print(Text(f"{self._done}/{self._total} {row.method}: {how}", style=style))
        self._show()

    def _show(self) -> None:
        if self._since and self._console.is_terminal:
            self._status.update(Text(f"{self._done}/{self._total} done: {', '.join(self._since)}"))
            self._status.start()
