"""The processes of ``peers.py``: one for each part of a row."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from attrs import define
from peer_rows import subjects

from kvcompress.compare.runner import crash
from kvcompress.models.embedded import NAME

WORKER = Path(__file__).with_name("peer_worker.py")


@define
class Runner:
    """Runs rows, each in processes of its own.

    Attributes:
        args: The command's arguments.
        folder: Keeps activations and fitted tables.
        scratch: Holds what this run alone needs.
    """

    args: argparse.Namespace
    folder: Path
    scratch: Path

    def run(self, label: str, protocol: dict[str, Any], *, first: bool) -> dict[str, Any]:
        """Measure a row, fitted before if it needs that; or time it again.

        Args:
            label: The row's.
            protocol: What to run.
            first: Measure everything, and not only times.

        Returns:
            What the worker answered; its errors if it did not.
        """
        about = subjects()[label]
        job = {
            "row": label,
            "model": NAME,
            "text": self.args.text,
            "protocol": protocol,
            "reference": str(self.scratch / f"reference-{protocol['context']}.f32"),
            "samples": str(self.folder / f"activations-{self.args.calibration_tokens}.pickle"),
            "tables": str(self.folder / self._tables_name(label)),
            "calibration_tokens": self.args.calibration_tokens,
            "steps": self.args.steps,
        }
        if about.fit and not Path(job["tables"]).exists():
            fitted = self._process({**job, "part": "fit"})
            if fitted["errors"]:
                return fitted
        return self._process({**job, "part": "measure" if first else "time"})

    def _tables_name(self, label: str) -> str:
        about = subjects()[label]
        made_of = [label, about.pin, about.config, self.args.calibration_tokens]
        digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
        return f"tables-{digest[:16]}.pickle"

    def _process(self, job: dict[str, Any]) -> dict[str, Any]:
        ask, answer = self.scratch / "job.json", self.scratch / "answer.json"
        ask.write_text(json.dumps(job), encoding="utf-8")
        answer.unlink(missing_ok=True)
        count = str(self.args.threads)
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), count)
        limit = self.args.row_seconds
        try:
            done = subprocess.run(
                [sys.executable, WORKER, ask, answer],
                env={**os.environ, **(threads if self.args.threads else {})},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return partial(answer, job["part"], f"not done after {limit:.0f} s")
        if done.returncode == 0:
            return partial(answer)
        return partial(answer, job["part"], crash(done.returncode, done.stderr))


def partial(path: Path, part: str = "", error: str = "") -> dict[str, Any]:
    """What a process answered before its end, and why it ended."""
    answer: dict[str, Any] = {"measures": {}, "times": {}, "errors": {}, "seconds": 0.0}
    if path.exists():
        answer |= json.loads(path.read_text(encoding="utf-8"))
    if error:
        answer["errors"][part] = error
    return answer
