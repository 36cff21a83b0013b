"""What ``peers.py`` says while it runs: a line a row, and how long it will still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define, field

COLUMNS = {
    "bits": ("bits_per_value", 1),
    "+tables": ("bits_per_value_with_tables", 1),
    "coded": ("coded_bits", 1),
    "MB": ("resident_bytes", 1e6),
    "active MB": ("active_bytes", 1e6),
    "+tables MB": ("active_bytes_with_tables", 1e6),
    "peak MB": ("peak_bytes", 1e6),
    "KL": ("kl", 1),
    "top-1": ("top1", 1),
    "recall": ("retrieval_recall", 1),
    "copy": ("retrieval_copy", 1),
    "step ms": ("step_ms", 1),
    "attn ms": ("attention_ms", 1),
    "read/s": ("prefill_tokens_per_second", 1),
    "enc us": ("encode_us_per_token", 1),
    "s": ("seconds", 1),
}


@define
class Progress:
    """Tells on stderr what is measured, and estimates what is left of a context.

    Attributes:
        context: Tokens.
        rounds: The rows of each round.
    """

    context: int
    rounds: list[list[str]]
    _spent: dict[int, list[float]] = field(factory=dict, init=False)

    @contextmanager
    def row(self, turn: int, label: str) -> Iterator[None]:
        """Measure a row inside this."""
        print(f"{self.context} tokens, round {turn + 1}: {label} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._spent.setdefault(turn, []).append(seconds)
        left = self._left() / 60
        print(f"  {seconds:.0f} s; about {left:.0f} min left", file=sys.stderr, flush=True)

    def _left(self) -> float:
        """Seconds: rows of a round take as long as those so far, or some third of a first one."""
        mean, left = 0.0, 0.0
        for turn, rows in enumerate(self.rounds):
            spent = self._spent.get(turn, [])
            mean = sum(spent) / len(spent) if spent else mean / 3 if turn == 1 else mean
            left += max(len(rows) - len(spent), 0) * mean
        return left


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    medians = {name: spread[0] for name, spread in row["times"].items()}
    numbers = {**row["measures"], **medians, "seconds": row["seconds"]}
    cells = []
    for title, (name, unit) in COLUMNS.items():
        value = numbers.get(name)
        cells.append(f"{title} {'-' if value is None else f'{value / unit:.4g}'}")
    errors = [f"{part}: {text}" for part, text in row["errors"].items()]
    return f"{row['row']:45s} " + ", ".join([*cells, *errors])
