from __future__ import annotations

import csv
import io
import json

import attrs
from rich.console import Console

from kvcompress.compare.columns import columns_of
from kvcompress.compare.render import csv_text, legend, markdown, print_table
from tests.compare.sample import sample_report


def test_json_starts_with_its_version_and_holds_everything() -> None:
    report = sample_report()
    stored = json.loads(report.to_json())
    assert next(iter(stored)) == "schema_version"
    assert stored["schema_version"] == 1
    assert stored["provenance"] == report.provenance
    assert [row["method"] for row in stored["rows"]] == [row.method for row in report.rows]
    assert stored["rows"][2]["measures"]["kl"] == 0.26
    assert stored["rows"][4]["error"].startswith("CalibrationRequired")
    assert stored["time"]["seconds"] == 60.0


def test_csv_has_one_line_a_row_and_every_measure() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(sample_report()))))
    assert [line["method"] for line in lines] == [row.method for row in sample_report().rows]
    assert float(lines[1]["kl"]) == 0.006
    assert float(lines[1]["decode_tokens_per_second"]) == 9.5
    assert lines[4]["kl"] == ""
    assert lines[4]["error"] == "CalibrationRequired: toy: make one"


def test_markdown_is_a_table_with_a_dash_for_what_was_not_measured() -> None:
    text = markdown(sample_report())
    table = [line for line in text.splitlines() if line.startswith("|")]
    columns = len(columns_of(sample_report())) + 1
    unescaped = [line.replace("\\|", "") for line in table]
    assert {line.count("|") for line in unescaped} == {columns + 1}
    assert "0.0060 ±0.0006" in table[3]
    assert table[2].count("| - ") == 1  # coded bits
    assert table[-1].count("| - ") == columns - 1
    assert "- `toy|x` failed: CalibrationRequired: toy: make one" in text


def test_the_terminal_shows_rows_failures_and_legend() -> None:
    out = io.StringIO()
    print_table(sample_report(), Console(file=out, width=500))
    shown = out.getvalue()
    for row in sample_report().rows:
        assert row.method in shown
    assert "toy|x failed: CalibrationRequired: toy: make one" in shown
    assert "how surprised it is" in shown
    for line in legend(sample_report()):
        assert line in shown


def test_the_legend_says_what_to_trust_and_what_exact_tokens_cost() -> None:
    lines = list(legend(sample_report()))
    assert len(lines) == 6  # five, and one for the added metric
    text = " ".join(lines)
    assert "KL is the number to trust" in text
    assert "float32: 32 bits" in text
    assert "0.5x" in text
    assert "1535 tokens" in text
    assert "of 1024 tokens read" in text

    report = sample_report()
    half = {**report.provenance, "model": {"name": "tiny", "dtype": "float16"}}
    half["without_retrieval"] = "no room"
    text = " ".join(legend(attrs.evolve(report, provenance=half)))
    assert "recall, copy: not measured (no room)." in text
    assert "float16: 16 bits" in text
    assert "0.5x" not in text


def test_the_legend_names_the_calibration() -> None:
    report = sample_report()
    used = {"text": {"name": "novels"}, "tokens": 8192}
    told = attrs.evolve(report, provenance={**report.provenance, "calibration": used})
    [added] = set(legend(told)) - set(legend(report))
    assert added == "Methods that need a calibration had one of 8,192 tokens of novels."
