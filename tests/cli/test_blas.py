"""Commands that compute put OpenBLAS in front before anything imports MLX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcompress.compare.job import Job
from kvcompress.compare.protocol import QUICK
from tests.cli.models import tiny_model

__all__ = ["tiny_model"]

SPY = """
import sys
from kvcompress import openblas

calls = []
real = openblas.prefer_openblas

def spy():
    calls.append("mlx.core" in sys.modules)
    return real()

openblas.prefer_openblas = spy
"""
COMMAND = """
from kvcompress.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code, calls, file=sys.stderr)
"""
WORKER = """
from pathlib import Path
from kvcompress.compare.worker import main
main(Path(sys.argv[1]), Path(sys.argv[2]))
print(0, calls, file=sys.stderr)
"""


def first_call(code: str, *words: str) -> str:
    """The last line that a program says: its status, and whether MLX was there at each call."""
    command = [sys.executable, "-c", SPY + code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--prompt", "Objects", "--max-tokens", "1", "--model", "TINY"),
        ("estimate", "affine", "--model", "TINY"),
        # These stop at a mistake that is found after the registry has imported MLX.
        ("calibrate", "--method", "turboquant", "--text", "missing", "--out", "OUT"),
        ("compare", "--text", "missing"),
    ],
    ids=lambda words: words[0],
)
def test_blas_comes_first(words: tuple[str, ...], tiny_model: str, tmp_path: Path) -> None:
    places = {"TINY": tiny_model, "OUT": str(tmp_path / "out")}
    said = first_call(COMMAND, *(places.get(word, word) for word in words))
    status = 2 if "missing" in words else 0
    assert said.startswith(f"{status} [False")


def test_blas_comes_first_in_a_worker(tmp_path: Path) -> None:
    job = Job(
        method="affine",
        model="missing",
        dtype=None,
        text="prose-eval",
        calibration=None,
        protocol=QUICK,
        reference="",
        record=True,
    )
    job.save(tmp_path / "job.json")
    assert first_call(WORKER, str(tmp_path / "job.json"), str(tmp_path / "answer.json")) == (
        "0 [False]"
    )
