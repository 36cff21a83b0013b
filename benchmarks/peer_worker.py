"""One part of a row of ``peers.py`` in a process of its own: ``peer_worker.py JOB ANSWER``.

Parts: ``fit`` makes the row's tables, where it has any, and leaves them in a file; ``measure``
takes everything; ``time`` takes the times again.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
from attrs import frozen  # noqa: E402
from peer_adapters import Caches  # noqa: E402
from peer_memory import Fresh, coded_bits  # noqa: E402
from peer_rows import PLAIN, Subject, subjects  # noqa: E402
from peer_timing import Clock, read_bytes_per_second  # noqa: E402

from kvcompress.cache.walk import reachable_arrays  # noqa: E402
from kvcompress.calibrate.capture import record  # noqa: E402
from kvcompress.calibrate.windows import source_of, text_windows  # noqa: E402
from kvcompress.compare.evaluate import Evaluator  # noqa: E402
from kvcompress.compare.memory import active_bytes, walked_bytes  # noqa: E402
from kvcompress.compare.metrics import METRICS  # noqa: E402
from kvcompress.compare.protocol import Protocol  # noqa: E402
from kvcompress.compare.reference import Playback, Recording  # noqa: E402
from kvcompress.compare.report import one_line  # noqa: E402
from kvcompress.compare.retrieval import retrieval  # noqa: E402
from kvcompress.compare.session import Session  # noqa: E402
from kvcompress.compare.worker import retrieval_prompt  # noqa: E402
from kvcompress.models import load_model  # noqa: E402
from kvcompress.models.room import keep_freed_memory  # noqa: E402
from kvcompress.text import encode, load_text  # noqa: E402

CALIBRATION_TEXT = "prose-calibration"


def main(job_path: Path, answer_path: Path) -> None:
    """Do a job; an error becomes its answer."""
    job = json.loads(job_path.read_text(encoding="utf-8"))
    subject = subjects()[job["row"]]
    answer: dict[str, Any] = {"measures": {}, "times": {}, "errors": {}}
    start = time.perf_counter()
    try:
        answer["version"] = subject.version()
        parts = fitting(job, subject) if job["part"] == "fit" else measure(job, subject, answer)
        for part in parts:
            attempt(part, answer["errors"])
            answer["seconds"] = time.perf_counter() - start
            keep(answer_path, json.dumps(answer).encode())  # what is done outlives a crash
    except Exception as error:  # the other rows must go on
        answer["errors"][job["part"]] = one_line(error)
        keep(answer_path, json.dumps(answer).encode())


def attempt(part: Callable[[], None], errors: dict[str, str]) -> None:
    """Take a part of a row; what goes wrong is told under the part's name."""
    try:
        part()
    except Exception as error:  # a peer may raise anything
        errors[part.__name__] = one_line(error)


def fitting(job: dict[str, Any], subject: Subject) -> Iterator[Callable[[], None]]:
    """Make the row's tables and keep them."""

    def fit() -> None:
        assert subject.fit is not None
        keep(Path(job["tables"]), pickle.dumps(subject.fit(lambda: recorded(job))))

    yield fit


def recorded(job: dict[str, Any]) -> Any:
    """The activations that peers are calibrated on; recorded once a run.

    Of all tokens: kvcompress keeps the first ones of a sequence exact, peers must code them.
    """
    path = Path(job["samples"])
    if not path.exists():
        loaded = load_model(job["model"], None)
        source = source_of(CALIBRATION_TEXT)
        windows = text_windows(loaded.tokenizer, source, job["calibration_tokens"])
        keep(path, pickle.dumps(record(loaded.model, windows, skip=0)))
    return pickle.loads(path.read_bytes())


def keep(path: Path, content: bytes) -> None:
    """Write a file that is either whole or not there."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def measure(
    job: dict[str, Any], subject: Subject, answer: dict[str, Any]
) -> Iterator[Callable[[], None]]:
    """Load the model and make the subject's caches; the parts to take, one after another."""
    keep_freed_memory()
    protocol = Protocol(**job["protocol"])
    text = load_text(job["text"])
    loaded = load_model(job["model"], None)
    mx.eval(loaded.model.parameters())
    ids = encode(loaded.tokenizer, text.content)
    windows = protocol.take_windows(ids, loaded.tokenizer.encode(""))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        fresh, make = made(job, subject, loaded.model)
    answer["warnings"] = sorted({str(one.message) for one in heard})
    answer["subject"] = {
        "model": {"name": loaded.name, "dtype": loaded.dtype, "fingerprint": loaded.fingerprint},
        "text": {"name": text.name, "sha256": text.sha256, "tokens": len(ids)},
        "device": str(mx.default_device()),
        "weight_bytes": sum(int(a.nbytes) for a in reachable_arrays([loaded.model.parameters()])),
    }
    row = Row(job, loaded, protocol, windows, make, fresh, answer)
    yield from [row.score, row.recall, row.time] if job["part"] == "measure" else [row.time]


def made(job: dict[str, Any], subject: Subject, model: Any) -> tuple[Fresh, Caches]:
    """What makes the row's caches, and what they take before their first token."""
    empty = active_bytes()
    tables = pickle.loads(Path(job["tables"]).read_bytes()) if subject.fit else None
    make = subject.make(model, tables)
    caches = make()
    mx.eval(list(reachable_arrays([caches, tables])))
    own, shared = walked_bytes(caches, model)
    return Fresh(own, shared, active_bytes() - empty, empty), make


@frozen(eq=False)
class Row:
    """The parts of a row, each of which adds to an answer."""

    job: dict[str, Any]
    loaded: Any
    protocol: Protocol
    windows: list[list[int]]
    make: Caches
    fresh: Fresh
    answer: dict[str, Any]

    def score(self) -> None:
        """What caches hold, and how far predictions are from the first row's."""
        before = active_bytes()
        record_it = self.job["row"] == PLAIN
        evaluator = Evaluator(
            model=self.loaded.model,
            tokenizer=self.loaded.tokenizer,
            protocol=self.protocol,
            metrics=METRICS,
            reference=(Recording if record_it else Playback)(Path(self.job["reference"])),
        )
        last: list[Any] = []

        def remembered() -> list[Any]:
            last[:] = self.make()
            return list(last)

        outcome = evaluator.run(remembered, self.windows)
        measures = self.fresh.apart(outcome.measures, outcome.readings, before)
        self.answer["measures"] |= {**measures, "coded_bits": coded_bits(last, measures)}

    def recall(self) -> None:
        """What is found again of what was read."""
        prompt, reason = retrieval_prompt(self.loaded.tokenizer, self.protocol.retrieval)
        if prompt is None:
            self.answer["without_retrieval"] = reason
        else:
            session = Session(self.loaded.model, self.make(), self.protocol.chunk)
            self.answer["measures"] |= retrieval(session, prompt)

    def time(self) -> None:
        """How long it takes."""
        clock = Clock(self.loaded.model, self.protocol.chunk, self.job["steps"])
        context = self.windows[0][: self.protocol.context]
        self.answer["times"] = clock.run(self.make(), context)
        self.answer["read_bytes_per_second"] = read_bytes_per_second()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
