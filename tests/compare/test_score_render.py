from __future__ import annotations

import csv
import io
import json

import attrs
from rich.console import Console

from kvcompress.compare.score_render import COLUMNS, csv_text, legend, markdown, print_table
from tests.compare.sample import sample_scores


def test_json_starts_with_its_version_and_holds_every_case() -> None:
    stored = json.loads(sample_scores().to_json())
    assert list(stored) == ["schema_version", "provenance", "rows", "time"]
    assert stored["rows"][1]["measures"]["ratio"] == 8.125
    assert stored["rows"][1]["cases"]["seed 0"]["all"] == 0.1015625


def test_csv_has_one_line_a_row_and_every_measure() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(sample_scores()))))
    assert len(lines) == 5
    assert float(lines[1]["ratio"]) == 8.125
    assert (lines[2]["error"], lines[2]["all"]) == ("ConfigError: toy: no", "")


def test_markdown_has_a_table_for_each_workload() -> None:
    text = markdown(sample_scores())
    assert (
        "**local_recency: made-up keys; the query asks for the last tokens; means over 2 seeds**"
        in text
    )
    assert (
        "keys and queries of tiny (float32) on prose-eval, tables fitted to prose-calibration"
        in text
    )
    table = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(COLUMNS) + 3}
    assert "| 200 | `a2ats:rope=single` | 0.102 | 0 | 0.163 | 8.12 | 0.0125 | 0.0300 |" in text
    assert text.count("`toy\\|x`") == 2
    assert text.count("toy|x failed: ConfigError: toy: no") == 1


def test_the_terminal_shows_tables_failures_and_legend() -> None:
    out = io.StringIO()
    print_table(sample_scores(), Console(file=out, width=500))
    shown = out.getvalue()
    for row in sample_scores().rows:
        assert row.method in shown
    assert shown.count("toy|x failed") == 1
    for line in legend(sample_scores()):
        assert line in shown


def test_the_legend_warns_of_made_up_keys_where_there_are_some() -> None:
    report = sample_scores()
    recorded = {"recorded": report.provenance["workloads"]["recorded"]}
    without = attrs.evolve(report, provenance={"workloads": recorded}, rows=report.rows[-1:])
    [warning] = set(legend(report)) - set(legend(without))
    assert warning.startswith("Made-up keys point everywhere alike")
