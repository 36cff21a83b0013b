from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcompress.compare.score_report import ScoreReport, ScoreRow
from kvcompress.compare.scores import compare_scores
from kvcompress.errors import ConfigError, UnknownMethod

MADE_UP = ("local_recency", "long_range_dependent")


@pytest.fixture(scope="module")
def report() -> ScoreReport:
    return compare_scores(MADE_UP, command="kvcompress compare")


def rows(report: ScoreReport, ending: str) -> list[ScoreRow]:
    return [row for row in report.rows if row.method.endswith(ending)]


def test_every_workload_length_and_method_has_a_row(report: ScoreReport) -> None:
    assert report.failed == ()
    assert [(row.workload, row.tokens) for row in rows(report, "rope=banded")] == [
        (workload, tokens) for workload in MADE_UP for tokens in (200, 400)
    ]
    assert len(report.rows) == 4 * 4
    for row in report.rows:
        assert list(row.cases) == [f"seed {seed}" for seed in range(5)]
        options = ("window", "sinks", "block", "codebook_bits", "sub_dim", "b")
        assert [row.config[name] for name in options] == [16, 0, 16, 6, 8, 2048]
        for name, mean in row.measures.items():
            if name != "ratio":
                numbers = [case[name] for case in row.cases.values()]
                assert mean == pytest.approx(sum(numbers) / 5)


def test_forms_of_rope_share_their_codes_and_their_recent_scores(report: ScoreReport) -> None:
    forms = [rows(report, f"=false:rope={form}") for form in ("exact", "banded", "single")]
    for exact, banded, single in zip(*forms, strict=True):
        for name in ("exact_rope", "key_error", "recent", "coded"):
            assert exact.measures[name] == banded.measures[name] == single.measures[name]
        assert exact.measures["recent"] == 0
        assert exact.measures["ratio"] == pytest.approx(1, abs=1e-4)
        # One constant rotation costs most, and bands of mean rotations a fraction of it.
        assert 1 < banded.measures["ratio"] < single.measures["ratio"]
        assert banded.measures["ratio"] < {"local_recency": 1.8}.get(banded.workload, 4)
        cost = banded.measures["all"] - exact.measures["all"]
        assert cost < 0.4 * (single.measures["all"] - exact.measures["all"])


def test_query_aware_codes_trade_the_keys_error_for_the_scores(report: ScoreReport) -> None:
    pairs = zip(rows(report, "=true:rope=exact"), rows(report, "=false:rope=exact"), strict=True)
    for aware, plain in pairs:
        assert aware.measures["all"] < plain.measures["all"]
        assert aware.measures["key_error"] > plain.measures["key_error"]


def test_two_runs_differ_in_their_times_alone(report: ScoreReport) -> None:
    def stored(one: ScoreReport) -> dict[str, Any]:
        return json.loads(one.to_json())

    first, second = stored(report), stored(compare_scores(MADE_UP, command="kvcompress compare"))
    assert first.pop("time")["seconds"] > 0
    second.pop("time")
    assert first == second
    assert next(iter(first)) == "schema_version"
    assert first["provenance"]["workloads"]["local_recency"]["seeds"] == [0, 1, 2, 3, 4]
    assert set(first["provenance"]["methods"]) == {"a2ats"}


def test_any_method_that_binds_takes_part_and_the_others_say_why_not(strangers: None) -> None:
    words = ("turboquant:bits=2", "fp16", "rows", "misfit", "affine:window=500")
    made = compare_scores(["local_recency", "local_recency"], words)
    by = {row.method: row for row in made.rows if row.tokens == 200}
    assert list(by) == list(words)
    for label in ("turboquant:bits=2", "rows"):
        assert by[label].error == ""
        assert by[label].measures["ratio"] == pytest.approx(1, abs=1e-3)
        assert by[label].measures["older"] > 0
    assert by["fp16"].error.startswith("ConfigError: fp16: layer 0 keeps the model's own cache")
    assert by["misfit"].error == "ArithmeticError: these tokens are not to its taste"
    assert by["affine:window=500"].error.endswith("none is coded, so there is no error")
    assert len(made.failed) == 6


def test_recorded_keys_are_a_models_own(tiny_model: Path) -> None:
    def run() -> ScoreReport:
        return compare_scores(["recorded"], ["turboquant:bits=3,2"], model=str(tiny_model))

    made = run()
    assert made.failed == ()
    assert [row.tokens for row in made.rows] == [400, 400, 1000, 1000]
    for finer, coarser in (made.rows[:2], made.rows[2:]):
        assert list(finer.cases) == ["layer 0", "layer 1"]
        assert 0 < finer.measures["all"] < coarser.measures["all"]
        assert finer.measures["recent"] == 0
        assert finer.tokens - 48 < finer.measures["coded"] <= finer.tokens - 32
    about = made.provenance["workloads"]["recorded"]
    assert about["model"]["dtype"] == "float32"
    assert about["text"]["name"] == "prose-eval"
    assert about["fitted_to"]["name"] == "prose-calibration"
    assert run().rows == made.rows


def test_mistakes_in_the_call_are_told(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--workload must be one of local_recency, .*\(got 'x'\)"
    ):
        compare_scores(["local_recency", "x"])
    with pytest.raises(UnknownMethod, match="nobody"):
        compare_scores(MADE_UP, ["nobody"])
    short = tmp_path / "short.txt"
    short.write_text("It was a long way to the harbour, and nobody knew the tides. " * 8)
    with pytest.raises(ConfigError, match=r"reads 1004 tokens \(the text .* has \d+\)"):
        compare_scores(["recorded"], model=str(tiny_model), text=str(short))
