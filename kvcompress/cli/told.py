"""What making a calibration says on standard error: a bar for each step, and its warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcompress.calibrate.contract import Progress


@contextmanager
def told() -> Iterator[Progress]:
    """Yield what is to be told of each step; nothing is shown before the first."""
    with _plain_warnings(), _bars() as progress:
        yield progress


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def progress(step: str, done: int, total: int) -> None:
        if not tasks:
            bars.start()
        if step not in tasks:
            tasks[step] = bars.add_task(step, total=total)
        bars.update(tasks[step], completed=done)

    try:
        yield progress
    finally:
        if tasks:
            bars.stop()


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings as this program's lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"warning: {message}", file=sys.stderr)
