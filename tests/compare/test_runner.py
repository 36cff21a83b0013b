from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcompress import list_methods
from kvcompress.calibrate import calibrate, demo
from kvcompress.compare import (
    DEFAULT_METHODS,
    YARDSTICKS,
    Observer,
    Protocol,
    Report,
    Row,
    compare,
    runner,
)
from kvcompress.compare.job import Job
from kvcompress.compare.methods import expand
from kvcompress.compare.runner import run_job
from kvcompress.errors import ConfigError, UnknownMethod, UnsupportedModel
from kvcompress.models import load_model
from kvcompress.text import load_text

SHORT = Protocol(
    name="short", context=300, windows=2, scored=64, step=16, chunk=128, retrieval=1600, decode=2
)


def test_every_method_that_comes_along_is_shown_by_default() -> None:
    shown = {spec.name for spec in expand((*YARDSTICKS, *DEFAULT_METHODS))}
    assert shown == {row.name for row in list_methods() if row.distribution == "kvcompress"}


class Witness(Observer):
    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, labels: Sequence[str]) -> None:
        self.events.append(f"{len(labels)} rows")

    def calibrating(self) -> AbstractContextManager[Any]:
        def progress(step: str, done: int, total: int) -> None:
            if done == total and step not in self.events:
                self.events.append(step)

        return nullcontext(progress)

    def row_starts(self, label: str) -> None:
        self.events.append(f"> {label}")

    def row_ends(self, row: Row) -> None:
        self.events.append(f"< {row.method}")


METHODS = ("plain", "crash", "quits", "needy", "nonsense", "plain")


@pytest.fixture(scope="module")
def outcome(strangers: None, tiny_model: Path) -> tuple[Report, list[str]]:
    witness = Witness()
    report = compare(
        METHODS,
        model=str(tiny_model),
        protocol=SHORT,
        command="kvcompress compare",
        observer=witness,
    )
    return report, witness.events


def row(outcome: tuple[Report, list[str]], method: str) -> Row:
    [found] = [row for row in outcome[0].rows if row.method == method]
    return found


def test_yardsticks_come_first_and_every_method_once(outcome: tuple[Report, list[str]]) -> None:
    labels = ["fp16", "affine:bits=4", "plain", "crash", "quits", "needy", "nonsense"]
    assert [row.method for row in outcome[0].rows] == labels
    steps = [event for label in labels for event in (f"> {label}", f"< {label}")]
    assert outcome[1] == ["7 rows", *steps]


def test_each_failure_is_a_row_that_says_how(outcome: tuple[Report, list[str]]) -> None:
    assert row(outcome, "crash").error == "Crash: SIGKILL: about to fall over"
    assert row(outcome, "quits").error == "Crash: exit status 3"
    assert row(outcome, "needy").error == (
        "CalibrationRequired: needy: make one with `kvcompress calibrate needy`"
    )
    assert row(outcome, "nonsense").error.startswith("KVCompressError: kl: not finite")
    assert len(outcome[0].failed) == 4


def test_a_row_that_hangs_is_stopped(strangers: None, tiny_model: Path, tmp_path: Path) -> None:
    job = Job(
        method="hang",
        model=str(tiny_model),
        dtype=None,
        text="prose-eval",
        calibration=None,
        protocol=SHORT,
        reference=str(tmp_path / "reference.f32"),
        record=True,
    )
    answer = run_job(job, tmp_path, seconds=2)
    assert answer.row == Row("hang", error="TimeOut: not done after 2 s; stopped")


def test_full_precision_is_the_reference_of_itself(outcome: tuple[Report, list[str]]) -> None:
    for method in ("fp16", "plain"):
        measures = row(outcome, method).measures
        assert measures["kl"] == 0
        assert measures["nll_change"] == 0
        assert measures["top1"] == 1
        assert measures["worst"] == 0
        assert measures["tokens"] == 363
        assert measures["fp16_bytes"] == 363 * 2 * 2 * 2 * 32 * 2
        # Room for 512 tokens is held, in float32.
        assert measures["resident_bytes"] == 512 * 2 * 2 * 2 * 32 * 4
        assert measures["reported_bytes"] == measures["resident_bytes"]


def test_four_bits_change_a_little_and_take_less(outcome: tuple[Report, list[str]]) -> None:
    full, four = row(outcome, "fp16").measures, row(outcome, "affine:bits=4").measures
    assert 0 < four["kl"] < 0.1
    assert 0 < four["kl_se"] < four["kl"]
    assert 0.5 < four["top1"] < 1
    assert four["perplexity"] == pytest.approx(full["perplexity"], rel=0.05)
    assert four["resident_bytes"] < 0.7 * full["resident_bytes"]
    assert four["reported_bytes"] == four["resident_bytes"]
    assert four["predicted_bytes"] == four["resident_bytes"] - four["reserved_bytes"]
    assert row(outcome, "affine:bits=4").readings["active_bytes"] >= four["resident_bytes"]
    assert four["coded_bits_per_value"] < four["bits_per_value"] < 32


def test_a_strangers_metric_and_workload_take_part(outcome: tuple[Report, list[str]]) -> None:
    assert outcome[0].added == {
        "worst": {"title": "worst", "help": "largest change of a log-probability"},
        "length": {"title": "length", "help": "tokens of three words"},
    }
    assert row(outcome, "affine:bits=4").measures["worst"] > 0
    assert row(outcome, "plain").measures["length"] == row(outcome, "fp16").measures["length"] > 2


def test_the_report_says_where_its_numbers_come_from(outcome: tuple[Report, list[str]]) -> None:
    provenance = json.loads(outcome[0].to_json())["provenance"]
    assert provenance["methods"]["plain"] == "strangers 1.2"
    assert provenance["model"]["dtype"] == "float32"
    assert len(provenance["model"]["fingerprint"]) == 64
    assert len(provenance["text"]["sha256"]) == 64
    assert provenance["text"]["tokens"] > 2 * SHORT.window_tokens
    assert provenance["without_retrieval"] == ""
    assert provenance["protocol"] == attrs.asdict(SHORT)
    assert provenance["command"] == "kvcompress compare"
    assert set(provenance["versions"]) == {"kvcompress", "mlx", "mlx-lm", "numpy", "python"}
    assert row(outcome, "affine:bits=4").config["bits"] == 4


def test_two_runs_differ_in_their_times_alone(strangers: None, tiny_model: Path) -> None:
    protocol = attrs.evolve(SHORT, context=200, windows=1, retrieval=300, decode=1)

    def run() -> dict:
        return json.loads(compare((), model=str(tiny_model), protocol=protocol).to_json())

    first, second = run(), run()
    for report in (first, second):
        assert report.pop("time")["seconds"] > 0
        for measured in report["rows"]:
            readings = measured.pop("readings")
            assert set(readings) == {
                "peak_bytes",
                "active_bytes",
                "decode_tokens_per_second",
                "seconds",
            }
            assert min(readings.values()) > 0
    assert first == second
    # There is no room for the facts; the rest was measured all the same.
    assert first["provenance"]["without_retrieval"].startswith("retrieval: tokens must be from")
    assert first["rows"][1]["measures"]["kl"] > 0


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"methods": ["nobody"]}, UnknownMethod, "no method named 'nobody'"),
        ({"methods": ["affine:bits=9"]}, ConfigError, "affine: bits must be"),
        ({"text": "no/such/file"}, ConfigError, "no/such/file"),
        ({"calibration": "no/such/file"}, ConfigError, "calibration: no/such/file cannot be read"),
        ({"model": "no/such/folder"}, UnsupportedModel, "no/such/folder"),
    ],
)
def test_a_mistake_in_the_call_is_told_at_once(
    arguments: dict, kind: type[Exception], text: str, tiny_model: Path
) -> None:
    with pytest.raises(kind, match=text):
        compare(**{"methods": (), "model": str(tiny_model), "protocol": SHORT, **arguments})


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e300, True, "60", None])
def test_a_time_that_cannot_be_waited_for_is_told_at_once(seconds: Any, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="compare: timeout must be a number of seconds up to"):
        compare(["fp16"], model=str(tiny_model), row_seconds=seconds)


def test_a_text_or_a_model_that_is_too_short_is_told_with_its_length(
    tiny_model: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Only a few words.")
    with pytest.raises(ConfigError, match=r"need 728 tokens of text \(the text has \d+\)"):
        compare((), model=str(tiny_model), text=str(short), protocol=SHORT)
    long = attrs.evolve(SHORT, context=5000, windows=1)
    with pytest.raises(ConfigError, match=r"5066 tokens are more than the model's 4096 positions"):
        compare((), model=str(tiny_model), protocol=long)


BRIEF = attrs.evolve(SHORT, context=200, windows=1, retrieval=0, decode=1)


@pytest.fixture
def one_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "YARDSTICKS", ("fp16",))


def test_the_embedded_model_is_calibrated_for_the_rows_that_need_it(
    strangers: None, embedded: tuple[str, list[int]], one_yardstick: None
) -> None:
    witness = Witness()
    words = ("turboquant", "rows", "misfit", "turboquant:centre=calibrated")
    report = compare(words, model=embedded[0], protocol=BRIEF, observer=witness)
    rows = {row.method: row for row in report.rows}
    # After full precision's row, which would tell of a mistake, and before the others.
    assert witness.events[2:5] == ["< fp16", "recording", "fitting rows entries=16"]
    assert [row.method for row in report.failed] == ["misfit"]
    assert rows["misfit"].error == "ArithmeticError: these tokens are not to its taste"
    provenance = report.provenance["calibration"]
    assert provenance["text"]["name"] == "prose-calibration"
    assert (provenance["tokens"], provenance["seed"]) == (demo.TOKENS, 0)
    assert provenance["methods"] == ["rows entries=16"]
    for label in ("rows", "turboquant:centre=calibrated"):
        assert rows[label].config["calibration"] == provenance["fingerprint"]
        assert rows[label].measures["kl"] > 0
    assert "calibration" not in rows["turboquant"].config


def test_a_calibration_that_is_given_wins(
    strangers: None, embedded: tuple[str, list[int]], tmp_path: Path, one_yardstick: None
) -> None:
    model, loaded = embedded
    tiny = load_model(model)
    path = tmp_path / "own.safetensors"
    own = calibrate(tiny.model, tiny.tokenizer, load_text("prose-calibration"), "rows", tokens=300)
    own.save(path)
    words = ("rows", "rows:entries=4")
    report = compare(words, model=model, protocol=BRIEF, calibration=str(path))
    assert loaded == []
    assert report.rows[1].config["calibration"] == own.fingerprint
    assert report.rows[2].error.startswith(
        "CalibrationMismatch: rows: the calibration was fitted for entries=16"
    )
    provenance = report.provenance["calibration"]
    assert provenance["path"] == str(path)
    assert len(provenance["sha256"]) == 64
    assert (provenance["fingerprint"], provenance["tokens"]) == (own.fingerprint, 300)


def test_another_model_without_calibration_gives_rows_that_say_what_to_do(
    strangers: None, tiny_model: Path, one_yardstick: None
) -> None:
    report = compare(("rows",), model=str(tiny_model), protocol=BRIEF)
    [failed] = report.failed
    assert failed.method == "rows"
    assert failed.error.startswith("CalibrationRequired: rows: needs a calibration")
    assert "kvcompress calibrate --method rows" in failed.error
    assert report.provenance["calibration"] is None
