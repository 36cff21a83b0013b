from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcompress import compare as package
from kvcompress.compare import DEFAULT_METHODS, QUICK, STANDARD, Report
from tests.cli.models import call, tiny_model
from tests.compare.sample import sample_report

__all__ = ["tiny_model"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answer with a made-up report, and keep what was asked for."""
    kept: dict[str, Any] = {}

    def made_up(methods: Any, **options: Any) -> Report:
        kept.update(methods=methods, **options)
        return sample_report()

    monkeypatch.setattr(package, "compare", made_up)
    return kept


def test_without_arguments_it_is_quick_and_on_the_embedded_model(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any]
) -> None:
    code, out, _ = call(capsys, "compare")
    assert code == 1  # a row of the sample failed
    assert out.startswith("**tiny (float32) on prose-eval")
    assert asked["methods"] == DEFAULT_METHODS
    assert asked["protocol"] == QUICK
    assert (asked["model"], asked["text"]) == ("smollm2-135m", "prose-eval")


def test_what_is_asked_for_is_what_is_run(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--protocol", "standard", "--context", "2000", "--model", "m", "--text", "t"]
    words += [
        "--timeout",
        "60",
        "--method",
        "affine:bits=2,3",
        "--method",
        "fp16",
        "--calibration",
        "c",
    ]
    monkeypatch.setattr(sys, "argv", ["kvcompress", "compare", *words, "--dtype", "x y"])
    call(capsys, "compare", *words)
    assert asked["methods"] == ["affine:bits=2,3", "fp16"]
    assert asked["protocol"].context == 2000
    assert asked["row_seconds"] == 60
    assert asked["protocol"].windows == STANDARD.windows
    assert (asked["model"], asked["text"], asked["calibration"]) == ("m", "t", "c")
    assert asked["command"].endswith("--calibration c --dtype 'x y'")


@pytest.mark.parametrize(
    ("shape", "start"),
    [("table", "tiny (float32)"), ("md", "**tiny"), ("csv", "method,error,"), ("json", "{\n")],
)
def test_every_format_goes_to_stdout_alone(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], shape: str, start: str
) -> None:
    _, out, err = call(capsys, "compare", "--format", shape)
    assert out.startswith(start)
    assert "affine:bits=4" in out
    assert err == ""


@pytest.mark.parametrize(
    ("name", "start"),
    [("r.md", "**tiny"), ("r.csv", "method,error,"), ("r.json", "{\n"), ("r.txt", "tiny (float")],
)
def test_a_file_takes_the_result_in_the_format_of_its_suffix(
    capsys: pytest.CaptureFixture[str],
    asked: dict[str, Any],
    tmp_path: Path,
    name: str,
    start: str,
) -> None:
    _, out, _ = call(capsys, "compare", "--out", str(tmp_path / name))
    assert out == ""
    assert (tmp_path / name).read_text().startswith(start)


def test_json_and_plot_come_beside_the_result(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], tmp_path: Path
) -> None:
    words = ("--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"))
    _, out, _ = call(capsys, "compare", *words)
    assert out.startswith("**tiny")
    assert json.loads((tmp_path / "r.json").read_text())["schema_version"] == 1
    assert (tmp_path / "r.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--format", "xml"), "--format must be one of table, md, csv, json (got 'xml')"),
        (("--protocol", "slow"), "--protocol must be one of quick, standard, long (got 'slow')"),
        (("--context", "0"), "context must be an integer of at least 2 (got 0)"),
        (("--out", "no/such/folder/r.md"), "r.md is not a file that can be written"),
        (("--json", "."), ". is not a file that can be written"),
        (("--plot", "drawing.foo"), "drawing.foo must end in one of"),
        (("--json", "r.png", "--plot", "./r.png"), "--json and --plot must be two files"),
        (("--out", "r.json", "--json", "r.json"), "--out and --json must be two files"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], words: tuple[str, ...], text: str
) -> None:
    code, out, err = call(capsys, "compare", *words)
    assert (code, out, asked) == (2, "", {})
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("shape", "start"),
    [
        ("table", "local_recency: "),
        ("md", "**local_"),
        ("csv", "workload,tokens,"),
        ("json", "{\n"),
    ],
)
def test_workloads_have_every_format_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shape: str, start: str
) -> None:
    words = ("--workload", "local_recency", "--method", "turboquant:bits=2", "--format", shape)
    code, out, err = call(capsys, "compare", *words, "--json", str(tmp_path / "r.json"))
    assert (code, err) == (0, "")
    assert out.startswith(start)
    assert "turboquant:bits=2" in out
    stored = json.loads((tmp_path / "r.json").read_text())
    assert [row["tokens"] for row in stored["rows"]] == [200, 400]


def test_a_workload_that_a_method_fails_ends_with_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--workload", "long_range_dependent", "--method", "fp16")
    code, out, _ = call(capsys, "compare", *words, "--out", str(tmp_path / "r.md"))
    assert (code, out) == (1, "")
    assert "fp16 failed: ConfigError" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("--context", "99"),
        ("--protocol", "standard"),
        ("--calibration", "c"),
        ("--timeout", "9"),
        ("--model", "m"),
        ("--dtype", "float16"),
        ("--text", "t"),
    ],
)
def test_what_has_no_part_in_a_workload_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    code, out, err = call(capsys, "compare", "--workload", "local_recency", *words)
    assert (code, out) == (2, "")
    assert err == f"error: compare: {words[0]} has no part in this --workload; leave it out\n"


def test_a_workload_is_drawn_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workload", "local_recency", "--method", "turboquant:bits=4")
    picture = tmp_path / "ages.png"
    code, _, _ = call(capsys, "compare", *words, "--plot", str(picture))
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = call(capsys, "compare", *words, "--plot", "drawing.foo")
    assert code == 2
    assert "drawing.foo must end in one of" in err


def test_recorded_keys_may_be_of_any_model_and_text(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("--workload", "recorded", "--method", "affine", "--model", tiny_model)
    code, out, _ = call(capsys, "compare", *words, "--text", "code-eval", "--dtype", "float32")
    assert code == 0
    assert out.startswith(f"**recorded: keys and queries of {tiny_model} (float32) on code-eval")


def test_a_real_comparison_from_the_command_line(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    words = ("--model", tiny_model, "--method", "turboquant:bits=2", "--context", "200")
    code, out, err = call(capsys, "compare", *words, "--format", "json")
    assert code == 0
    report = json.loads(out)
    rows = {row["method"]: row["measures"] for row in report["rows"]}
    assert list(rows) == ["fp16", "affine:bits=4", "turboquant:bits=2"]
    assert rows["fp16"]["kl"] == 0
    assert rows["turboquant:bits=2"]["kl"] > 0
    assert rows["turboquant:bits=2"]["resident_bytes"] < rows["affine:bits=4"]["resident_bytes"]
    assert rows["fp16"]["retrieval_tokens"] == 1024
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "1/3 fp16",
        "2/3 affine",
        "3/3 turboquant",
    ]
