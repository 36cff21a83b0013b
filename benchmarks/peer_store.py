"""The report of ``peers.py``: a file that grows row by row, and can be gone on with."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

SCHEMA = 2
TIMES = ("step_ms", "attention_ms", "prefill_tokens_per_second", "encode_us_per_token")
"""Times, in the report as median, least and most of all rounds."""


@define
class Store:
    """Rows by context.

    Attributes:
        path: The file, if one is kept.
        settings: What was asked for and where; rows of other settings do not mix with these.
        runs: A run a context.
    """

    path: Path | None
    settings: dict[str, Any]
    runs: list[dict[str, Any]] = field(factory=list)

    @classmethod
    def open(cls, path: Path | None, settings: dict[str, Any], *, fresh: bool) -> Store:
        """What is in a file, or nothing.

        Raises:
            SystemExit: The file was measured with other settings.
        """
        store = cls(path, settings)
        if path is None or fresh or not path.exists():
            return store
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema_version") != SCHEMA or data["settings"] != settings:
            raise SystemExit(
                f"{path} was measured with other settings or versions; give another --out, or "
                f"--fresh to start it anew"
            )
        store.runs = data["runs"]
        return store

    def run_of(self, protocol: dict[str, Any]) -> dict[str, Any]:
        """The run of a protocol; a new one if there is none.

        Raises:
            SystemExit: The file has the same context measured otherwise.
        """
        for run in self.runs:
            if run["protocol"] == protocol:
                return run
            if run["protocol"]["context"] == protocol["context"]:
                raise SystemExit(
                    f"{self.path} has a context of {protocol['context']} measured otherwise; give "
                    f"another --out, or --fresh to start it anew"
                )
        run = {"protocol": protocol, "subject": None, "read_bytes_per_second": 0.0, "rows": []}
        self.runs.append(run)
        self.runs.sort(key=lambda one: one["protocol"]["context"])
        return run

    def write(self) -> None:
        """Put everything into the file, which is whole at any moment."""
        if self.path is None:
            return
        report = {"schema_version": SCHEMA, "settings": self.settings, "runs": self.runs}
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        new.replace(self.path)


def row_of(run: dict[str, Any], label: str) -> dict[str, Any] | None:
    """A row of a run by its label."""
    return next((row for row in run["rows"] if row["row"] == label), None)


def put(run: dict[str, Any], row: dict[str, Any], order: list[str]) -> None:
    """Put a row into a run, in the place of one of the same label, in a given order."""
    run["rows"] = [one for one in run["rows"] if one["row"] != row["row"]] + [row]
    run["rows"].sort(key=lambda one: order.index(one["row"]) if one["row"] in order else -1)


def with_round(
    row: dict[str, Any], times: Mapping[str, float], plain: Mapping[str, float]
) -> dict[str, Any]:
    """A row with one more round of times, and what has to be said of all of them.

    Args:
        row: The row so far.
        times: Its times in a round.
        plain: Those of the plain row in the same round, which its own are divided by.
    """
    ratios = {name: times[name] / plain[name] for name in TIMES if plain.get(name)}
    rounds = [*row["rounds"], {"times": dict(times), "ratios": ratios}]
    return {
        **row,
        "rounds": rounds,
        "times": dict(_spreads([one["times"] for one in rounds], (*TIMES, "held_bytes"))),
        "ratios": dict(_spreads([one["ratios"] for one in rounds], TIMES)),
    }


def _spreads(
    rounds: list[dict[str, float]], names: tuple[str, ...]
) -> Iterator[tuple[str, list[float]]]:
    for name in names:
        values = [one[name] for one in rounds if name in one]
        if values:
            yield name, [statistics.median(values), min(values), max(values)]
