"""Run a comparison: one fresh process a row, some of them side by side."""

from __future__ import annotations

import datetime
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvcompress import errors
from kvcompress.compare.calibrated import Made, description, lacking, make
from kvcompress.compare.job import Answer, Job
from kvcompress.compare.methods import expand
from kvcompress.compare.protocol import QUICK, Protocol
from kvcompress.compare.provenance import distributions, file_identity, machine, versions
from kvcompress.compare.report import Report, Row
from kvcompress.compare.turns import check_jobs, default_jobs
from kvcompress.config.option import shown
from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.models.embedded import NAME as EMBEDDED
from kvcompress.models.embedded import ensure_demo_model
from kvcompress.openblas import prefer_openblas
from kvcompress.text import load_text

if TYPE_CHECKING:
    from kvcompress.calibrate.contract import Progress

FULL_PRECISION: Final = "fp16"
"""The method whose predictions the others are held against."""

YARDSTICKS: Final = (FULL_PRECISION, "affine:bits=4")
"""Rows of every comparison."""

DEFAULT_METHODS: Final = ("turboquant:bits=4", "vecinfer", "commvq:bits=1", "a2ats")
"""What a comparison runs beside the yardsticks when no method is named.

All methods, but one row each: the first run makes their calibrations, too, and somebody waits.
"""

DEFAULT_TEXT: Final = "prose-eval"

ROW_SECONDS: Final = 3600.0
"""Time after which a row counts as hung."""

LONGEST_SECONDS: Final = 7 * 24 * 3600
"""The most that a row may be given; waiting for longer than 24 days is beyond ``poll``."""


class Observer:
    """Is told how a comparison gets on; this one does nothing with it."""

    def begin(self, labels: Sequence[str]) -> None:
        """The comparison starts; ``labels`` are the words of its rows in order."""

    def calibrating(self) -> AbstractContextManager[Progress | None]:
        """Calibrations may have to be made; what is entered is told of each step."""
        return nullcontext()

    def row_starts(self, label: str) -> None:
        """A row's process is about to start."""

    def row_ends(self, row: Row) -> None:
        """A row is done, well or not."""


def compare(
    methods: Iterable[str] = DEFAULT_METHODS,
    *,
    model: str = EMBEDDED,
    dtype: str | None = None,
    text: str = DEFAULT_TEXT,
    protocol: Protocol = QUICK,
    calibration: str | None = None,
    row_seconds: float = ROW_SECONDS,
    jobs: int | None = None,
    command: str = "",
    observer: Observer | None = None,
) -> Report:
    """Measure methods on a model, each in a process of its own.

    A method that fails, crashes or hangs becomes a row that says so, and the others go on. Only
    installed methods can take part: a fresh process does not know what was registered by hand.

    On the embedded model, methods that need a calibration and were given none get one that is
    made once and kept in the cache folder. On another model their rows say how to make it.

    Args:
        methods: Words for methods, ``name:option=value``; several values make several rows.
        model: Name of the model, as for :func:`kvcompress.models.load_model`.
        dtype: Type to cast the model to.
        text: A built-in text, a file or a folder.
        protocol: What to run.
        calibration: Path of a calibration file, for the methods that take one.
        row_seconds: Time that a row may take.
        jobs: Rows to measure at a time; what they time, each does alone. By default two of the
            embedded model on a CPU, whose cores one row does not fill, else one.
        command: The command line, for the record.
        observer: Told as rows start and end.

    Raises:
        ConfigError: A method's words, ``row_seconds`` or ``jobs`` are not legal, or text and model
            are too short for the protocol.
        KVCompressError: The full-precision row failed, without which there is no comparison.
    """
    prefer_openblas()  # before anything imports mlx: calibrations are made in this process
    observer = observer or Observer()
    if jobs is None:
        jobs = default_jobs(model)
    check_jobs(jobs)
    check_seconds(row_seconds)
    started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
    calibrated_by = _of_file(calibration)
    specs = expand((*YARDSTICKS, *methods), calibration)
    load_text(text)  # a missing file is told before anything heavy starts
    if model == EMBEDDED:
        ensure_demo_model()  # fetched once, with progress, and not on a row's time
    labels = [spec.label for spec in specs]
    observer.begin(labels)
    with tempfile.TemporaryDirectory(prefix="kvcompress-") as folder:
        scratch = Path(folder)
        own = str(scratch / "calibration.safetensors")
        made = Made()
        telling = threading.Lock()  # observers are told one thing at a time

        def measured(label: str) -> Answer:
            with telling:
                observer.row_starts(label)
            if label in made.errors:
                answer = Answer(Row(label, error=made.errors[label]))
            else:
                job = Job(
                    method=label,
                    model=model,
                    dtype=dtype,
                    text=text,
                    calibration=own if label in made.methods else calibration,
                    protocol=protocol,
                    reference=str(scratch / "reference.f32"),
                    record=label == FULL_PRECISION,
                    jobs=jobs,
                    turns=str(scratch / "turns"),
                )
                answer = run_job(job, scratch, row_seconds)
            with telling:
                observer.row_ends(answer.row)
            return answer

        full = measured(FULL_PRECISION)
        _must_succeed(full.row)  # before minutes go into calibrations
        if calibration is None and model == EMBEDDED:
            with observer.calibrating() as progress:
                made = make(lacking(labels), progress)
        if made.calibration is not None:
            made.calibration.save(own)
            calibrated_by = description(made.calibration)
        pool = ThreadPoolExecutor(jobs)
        try:
            rows = [full.row, *(answer.row for answer in pool.map(measured, labels[1:]))]
        finally:
            pool.shutdown(cancel_futures=True)
    subject = dict(full.subject)
    added = subject.pop("added")
    provenance = {
        "versions": versions(),
        "methods": distributions(spec.name for spec in specs),
        **machine(),
        **subject,
        "calibration": calibrated_by,
        "protocol": attrs.asdict(protocol),
        "command": command,
    }
    seconds = round(time.perf_counter() - clock, 1)
    when = {"started": started.isoformat(timespec="seconds"), "seconds": seconds}
    return Report(provenance, tuple(rows), added, when)


def check_seconds(seconds: float) -> None:
    """Refuse a time for a row that no process can be waited for.

    Raises:
        ConfigError: It is no positive number, or more than a week.
    """
    number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigError(
            f"compare: timeout must be a number of seconds up to {LONGEST_SECONDS}, a week "
            f"(got {shown(seconds)})"
        )


def _of_file(path: str | None) -> dict[str, Any] | None:
    """What a calibration file is and was made of, if there is one.

    Raises:
        ConfigError: It cannot be read, or is no calibration.
        CalibrationMismatch: It has another format.
    """
    identity = file_identity(path)
    if path is None or identity is None:
        return None
    from kvcompress.calibrate.file import load_calibration

    return {**identity, **description(load_calibration(path))}


def run_job(job: Job, scratch: Path, seconds: float) -> Answer:
    """Run one job in a fresh process; whatever goes wrong becomes the answer's row."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    job_path, answer_path = folder / "job.json", folder / "answer.json"
    job.save(job_path)
    command = [sys.executable, "-m", "kvcompress.compare.worker", str(job_path), str(answer_path)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(Row(job.method, error=f"TimeOut: not done after {seconds:.0f} s; stopped"))
    if answer_path.exists() and done.returncode == 0:
        return Answer.load(answer_path)
    return Answer(Row(job.method, error=crash(done.returncode, done.stderr)))


def crash(code: int, stderr: str) -> str:
    """How a process ended that left no answer, with the last thing it said."""
    end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    return ": ".join(["Crash", end, *said[-1:]])


def _must_succeed(row: Row) -> None:
    """Raise what the full-precision row ended with, as the kind of error that it was."""
    if not row.error:
        return
    kind, _, text = row.error.partition(": ")
    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, KVCompressError):
        raise cls(text)
    raise KVCompressError(f"the full-precision row failed: {row.error}")
