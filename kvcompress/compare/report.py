"""The outcome of a comparison: one row a method, and where the numbers come from."""

from __future__ import annotations

import json
from typing import Any, Final

import attrs
from attrs import field, frozen

SCHEMA_VERSION: Final = 1
"""Version of the JSON form; raised when a field changes its meaning or goes away."""


@frozen
class Row:
    """What was measured of one method.

    Attributes:
        method: The words that stand for the configuration; they can be given to ``--method``.
        config: Every option of the method with its value.
        error: Kind and text of what went wrong; empty for a row with measures.
        measures: Numbers by name that are the same in every run; ``None`` or absent where not
            measured.
        readings: Numbers by name that differ from run to run: times, and memory as MLX's
            allocator sees it, which frees when it finds time.
    """

    method: str
    config: dict[str, Any] = field(factory=dict)
    error: str = ""
    measures: dict[str, float | None] = field(factory=dict)
    readings: dict[str, float | None] = field(factory=dict)

    def value(self, name: str) -> float | None:
        """A measure or reading by name; ``None`` where it was not measured."""
        return self.measures.get(name, self.readings.get(name))


@frozen
class Report:
    """A comparison.

    Attributes:
        provenance: Versions, model, text, protocol, command: what one needs to run it again.
        rows: Full precision first, then the methods in the order they were asked for.
        added: Title and meaning of each metric and workload that plugins added, by name.
        time: When it started and how long it took; apart, so that two runs can be compared.
        schema_version: Version of the JSON form.
    """

    provenance: dict[str, Any]
    rows: tuple[Row, ...]
    added: dict[str, dict[str, str]] = field(factory=dict)
    time: dict[str, Any] = field(factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def failed(self) -> tuple[Row, ...]:
        """Rows without measures."""
        return tuple(row for row in self.rows if row.error)

    def to_json(self) -> str:
        """The report as JSON text."""
        fields = attrs.asdict(self)
        ordered = {"schema_version": fields.pop("schema_version"), **fields}
        return json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def one_line(error: BaseException) -> str:
    """An error's kind and text on one line, as rows show it."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
