"""What a worker process is told, and what it answers: two small JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from kvcompress.compare.protocol import Protocol
from kvcompress.compare.report import Row


@frozen(kw_only=True)
class Job:
    """One row to measure.

    Attributes:
        method: The words for the method and its options.
        model: Name of the model.
        dtype: Type to cast the model to, or ``None``.
        text: Name or path of the text.
        calibration: Path of a calibration file for a method that takes one.
        protocol: What to run.
        reference: File of full precision's log-probabilities.
        record: Whether this row is full precision and writes that file.
        jobs: Rows that are measured at the same time.
        turns: File that they lock in turns.
    """

    method: str
    model: str
    dtype: str | None
    text: str
    calibration: str | None
    protocol: Protocol
    reference: str
    record: bool
    jobs: int = 1
    turns: str = ""

    def save(self, path: Path) -> None:
        """Write the job to a file."""
        path.write_text(json.dumps(attrs.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what :meth:`save` wrote."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**stored, "protocol": Protocol(**stored["protocol"])})


@frozen
class Answer:
    """What a worker found out.

    Attributes:
        row: The row, with measures or with an error.
        subject: What was measured on: the model, the text, added metrics; empty on an error.
    """

    row: Row
    subject: dict[str, Any] = field(factory=dict)

    def save(self, path: Path) -> None:
        """Write the answer to a file."""
        path.write_text(json.dumps(attrs.asdict(self), allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Answer:
        """Read what :meth:`save` wrote."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(Row(**stored["row"]), stored["subject"])
