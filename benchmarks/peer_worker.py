"""One row of ``peers.py`` in a process of its own: ``peer_worker.py JOB.json ANSWER.json``."""

from __future__ import annotations

import json
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
from peer_adapters import PLAIN, Subject, subjects  # noqa: E402
from peer_timing import Clock  # noqa: E402

from kvcompress.cache.walk import reachable_arrays  # noqa: E402
from kvcompress.calibrate.capture import record  # noqa: E402
from kvcompress.calibrate.windows import source_of, text_windows  # noqa: E402
from kvcompress.compare.evaluate import Evaluator  # noqa: E402
from kvcompress.compare.memory import walked_bytes  # noqa: E402
from kvcompress.compare.metrics import METRICS  # noqa: E402
from kvcompress.compare.protocol import Protocol  # noqa: E402
from kvcompress.compare.reference import Playback, Recording  # noqa: E402
from kvcompress.compare.report import one_line  # noqa: E402
from kvcompress.compare.retrieval import retrieval  # noqa: E402
from kvcompress.compare.session import Session  # noqa: E402
from kvcompress.compare.worker import CPU_CACHE_BYTES, retrieval_prompt  # noqa: E402
from kvcompress.models import load_model  # noqa: E402
from kvcompress.text import encode, load_text  # noqa: E402

CALIBRATION_TEXT = "prose-calibration"


def main(job_path: Path, answer_path: Path) -> None:
    """Measure a row; an error becomes its answer."""
    job = json.loads(job_path.read_text(encoding="utf-8"))
    subject = subjects()[job["row"]]
    answer: dict[str, Any] = {
        "row": subject.label,
        "package": subject.package,
        "config": subject.config,
        "note": subject.note,
        "measures": {},
        "readings": {},
        "errors": {},
    }
    start = time.perf_counter()
    try:
        answer["version"] = subject.version()
        measure(job, subject, answer)
    except Exception as error:  # the other rows must go on
        answer["errors"]["row"] = one_line(error)
    answer["readings"]["seconds"] = time.perf_counter() - start
    answer_path.write_text(json.dumps(answer), encoding="utf-8")


def measure(job: dict[str, Any], subject: Subject, answer: dict[str, Any]) -> None:
    """Load the model, make the subject's caches, and take each part of the row by itself."""
    if mx.default_device() == mx.cpu:
        mx.set_cache_limit(CPU_CACHE_BYTES)
    protocol = Protocol(**job["protocol"])
    text = load_text(job["text"])
    loaded = load_model(job["model"], None)
    mx.eval(loaded.model.parameters())
    ids = encode(loaded.tokenizer, text.content)
    windows = protocol.take_windows(ids, loaded.tokenizer.encode(""))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        start = time.perf_counter()
        make = subject.make(loaded.model, lambda: recorded(job, loaded))
        answer["readings"]["fit_seconds"] = time.perf_counter() - start
        caches = make()
        mx.eval(list(reachable_arrays(caches)))  # what is fitted must not count as the caches'
        fresh, _ = walked_bytes(caches, loaded.model)
        del caches
    answer["warnings"] = sorted({str(one.message) for one in heard})
    evaluator = Evaluator(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        protocol=protocol,
        metrics=METRICS,
        reference=(Recording if subject.label == PLAIN else Playback)(Path(job["reference"])),
    )
    measures, readings = answer["measures"], answer["readings"]

    def score() -> None:
        outcome = evaluator.run(make, windows)
        readings.update(outcome.readings)
        measures.update(tables_apart(outcome.measures, fresh))

    def recall() -> None:
        prompt, reason = retrieval_prompt(loaded.tokenizer, protocol.retrieval)
        if prompt is None:
            answer["without_retrieval"] = reason
        else:
            measures.update(retrieval(Session(loaded.model, make(), protocol.chunk), prompt))

    def times() -> None:
        clock = Clock(loaded.model, protocol.chunk, job["steps"], job["repeats"])
        readings.update(clock.run(make, windows[0][: protocol.context]))

    for name, part in {"score": score, "retrieval": recall, "times": times}.items():
        attempt(name, part, answer["errors"])
    answer["subject"] = {
        "model": {"name": loaded.name, "dtype": loaded.dtype, "fingerprint": loaded.fingerprint},
        "text": {"name": text.name, "sha256": text.sha256, "tokens": len(ids)},
        "device": str(mx.default_device()),
    }


def attempt(name: str, part: Callable[[], None], errors: dict[str, str]) -> None:
    """Take a part of a row; what goes wrong is told under the part's name."""
    try:
        part()
    except Exception as error:  # a peer may raise anything
        errors[name] = one_line(error)


def tables_apart(measures: dict[str, Any], fresh: int) -> dict[str, Any]:
    """Count what caches hold before their first token as tables, as kvcompress's tables are.

    Args:
        measures: What the evaluator counted.
        fresh: Bytes of arrays of caches that have seen nothing.
    """
    resident, tables = measures["resident_bytes"] - fresh, measures["table_bytes"] + fresh
    values = measures["fp16_bytes"] / 2
    return {
        **measures,
        "resident_bytes": resident,
        "table_bytes": tables,
        "bits_per_value": 8 * resident / values,
        "bits_per_value_with_tables": 8 * (resident + tables) / values,
        "times_smaller": 2 * values / resident,
    }


def recorded(job: dict[str, Any], loaded: Any) -> Any:
    """The activations that peers are calibrated on; recorded once a run."""
    path = Path(job["samples"])
    if not path.exists():
        source = source_of(CALIBRATION_TEXT)
        windows = text_windows(loaded.tokenizer, source, job["calibration_tokens"])
        path.write_bytes(pickle.dumps(record(loaded.model, windows)))
    return pickle.loads(path.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
