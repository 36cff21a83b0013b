from __future__ import annotations

from pathlib import Path

from kvcompress.compare.job import Answer, Job
from kvcompress.compare.protocol import QUICK
from kvcompress.compare.report import Row


def test_job_and_answer_survive_their_files(tmp_path: Path) -> None:
    job = Job(
        method="turboquant:bits=2",
        model="some/model",
        dtype=None,
        text="prose-eval",
        calibration=None,
        protocol=QUICK,
        reference="reference.f32",
        record=False,
    )
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job
    row = Row("a", {"bits": 2}, measures={"kl": 0.1, "kl_se": None}, readings={"seconds": 3.0})
    answer = Answer(row, {"model": {"name": "m"}})
    answer.save(tmp_path / "answer.json")
    assert Answer.load(tmp_path / "answer.json") == answer
