"""The outcome of a comparison of scores."""

from __future__ import annotations

import json
from typing import Any, Final

import attrs
from attrs import field, frozen

SCHEMA_VERSION: Final = 1
"""Version of the JSON form; raised when a field changes its meaning or goes away."""


@frozen
class ScoreRow:
    """One method on one workload.

    Attributes:
        workload: Its name.
        tokens: Tokens of a case.
        method: The words that stand for the configuration.
        config: Every option of the method with its value.
        error: Kind and text of what went wrong; empty for a row with measures.
        measures: Means over the cases, by name.
        cases: The measures of each case, by its name.
    """

    workload: str
    tokens: int
    method: str
    config: dict[str, Any] = field(factory=dict)
    error: str = ""
    measures: dict[str, float | None] = field(factory=dict)
    cases: dict[str, dict[str, float]] = field(factory=dict)


@frozen
class ScoreReport:
    """A comparison of scores.

    Attributes:
        provenance: Versions, workloads, model, command: what one needs to run it again.
        rows: By workload, then by number of tokens, then in the order of the methods.
        time: When it started and how long it took; apart, so that two runs can be compared.
        schema_version: Version of the JSON form.
    """

    provenance: dict[str, Any]
    rows: tuple[ScoreRow, ...]
    time: dict[str, Any] = field(factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def failed(self) -> tuple[ScoreRow, ...]:
        """Rows without measures."""
        return tuple(row for row in self.rows if row.error)

    def to_json(self) -> str:
        """The report as JSON text."""
        fields = attrs.asdict(self)
        ordered = {"schema_version": fields.pop("schema_version"), **fields}
        return json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
