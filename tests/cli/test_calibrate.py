from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcompress import cli
from kvcompress.calibrate import Calibration
from kvcompress.cli.calibrate import calibrate, split_names
from kvcompress.models import embedded
from tests.calibrate.fakes import PROSE, ByteTokenizer, tiny_llama
from tests.cli.models import peak

__all__ = ["peak"]


pytestmark = pytest.mark.usefixtures("peak")


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setitem(cli.COMMANDS, "calibrate", ("kvcompress.cli.calibrate:calibrate", ""))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were loaded; all are tiny ones."""
    names: list[str] = []

    def load(name: str) -> Any:
        names.append(name)
        return SimpleNamespace(model=tiny_llama(), tokenizer=ByteTokenizer())

    monkeypatch.setattr("kvcompress.models.load_model", load)
    return names


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["calibrate", *map(str, words)])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_it_writes_the_file_and_says_how_well_it_fits(
    asked: list[str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cal.safetensors"
    words = ("--method", "peak:bits=4,8", "--text", text, "--tokens", 600, "--out", file)
    code, out, err = run(capsys, *words, "--seed", 3, "--model", "some/model")
    assert code == 0
    assert asked == ["some/model"]
    calibration = Calibration.load(file)
    assert [fit.key.values["bits"] for fit in calibration.fits] == [4, 8]
    assert calibration.provenance["seed"] == 3
    assert calibration.provenance["tokens"] == 600
    rows = [line for line in out.splitlines() if "peak" in line]
    assert len(rows) == 2
    assert "bits=4" in rows[0]
    assert "(layer " in rows[0]
    assert f"wrote {file}" in out
    assert "2 layers, 600 tokens, recorded in" in out
    assert "recording" in err
    assert "fitting peak bits=4" in err


def test_a_text_that_ends_early_is_told(
    asked: list[str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "--method", "peak", "--text", text, "--out", tmp_path / "c")
    assert f"{len(PROSE):,} tokens of 16,384 asked for: the text has no more" in out


def test_warnings_are_lines_of_standard_error(
    asked: list[str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--text", text, "--tokens", 600, "--out", tmp_path / "c")
    code, out, err = run(capsys, "--method", "peak:bits=2,4:centroids=64", *words)
    assert code == 0
    assert err.count("warning: peak: 559 tokens are few for 64 centroids") == 1
    assert "are few" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "nobody"], "no method named 'nobody'"),
        (["--method", "peak:bits=9"], "peak: bits must be an integer from 1 to 8 (got '9')"),
        (["--method", "peak", "--text", "missing"], "'missing' is neither a file"),
        (["--method", "peak", "--tokens", "3"], "tokens must be an integer of at least 64"),
        (["--method", "peak", "--seed", "-1"], "seed must be an integer of at least 0"),
        (["--method", "peak", "--out", "/missing/c"], "the folder /missing is missing"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    message: str,
    asked: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "c"
    given = words if "--out" in words else [*words, "--out", str(file)]
    code, out, err = run(capsys, *given)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err
    assert not file.exists()


def test_a_wrong_call_loads_no_model(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "--method", "nobody", "--out", tmp_path / "c")
    run(capsys, "--method", "peak", "--out", tmp_path)
    run(capsys, "--method", "peak", "--text", "missing", "--out", tmp_path / "c")
    assert asked == []


def test_names_are_split_at_commas_unless_options_follow() -> None:
    words = ["a2ats,vecinfer", "commvq:stages=4,8", "x"]
    assert split_names(words) == ["a2ats", "vecinfer", "commvq:stages=4,8", "x"]


def test_the_defaults_are_the_function_s() -> None:
    from kvcompress.calibrate.api import calibrate as function

    ours, theirs = (inspect.signature(f).parameters for f in (calibrate, function))
    for name in ("tokens", "seed"):
        assert ours[name].default == theirs[name].default
    assert ours["model"].default == embedded.NAME


@pytest.mark.parametrize("method", ["", ","])
def test_a_call_for_no_method_is_told_before_anything_is_loaded(
    method: str, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "--method", method, "--out", tmp_path / "cal.safetensors")
    assert code == 2
    assert "--method names no method" in err
    assert asked == []
