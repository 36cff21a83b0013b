from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcompress.compare import compare, turns
from kvcompress.compare.protocol import Protocol
from kvcompress.compare.turns import Turns, default_jobs
from kvcompress.errors import ConfigError
from kvcompress.models import load

WORKS = """
import sys, time
from pathlib import Path
from kvcompress.compare.turns import Turns
turns, log = Turns(Path(sys.argv[1])), Path(sys.argv[2])
until = time.time() + 3
while time.time() < until and not log.with_suffix(".stop").exists():
    with turns.together():
        log.write_text(log.read_text() + "." if log.exists() else ".")
        time.sleep(0.01)
"""


def test_what_runs_alone_waits_for_others_and_they_for_it(tmp_path: Path) -> None:
    lock, log = tmp_path / "turns", tmp_path / "log"
    worker = subprocess.Popen([sys.executable, "-c", WORKS, str(lock), str(log)])
    try:
        while not log.exists():
            assert worker.poll() is None
            time.sleep(0.01)
        with Turns(lock).together():  # beside the other
            before = len(log.read_text())
            time.sleep(0.3)
            assert len(log.read_text()) > before
        with Turns(lock).alone():
            before = len(log.read_text())
            time.sleep(0.3)
            assert len(log.read_text()) == before
        log.with_suffix(".stop").touch()
        assert worker.wait(10) == 0
    finally:
        worker.kill()
        worker.wait()


def test_a_process_that_dies_alone_lets_the_others_go_on(tmp_path: Path) -> None:
    dies = "import os, sys; from pathlib import Path; from kvcompress.compare.turns import Turns\n"
    dies += "with Turns(Path(sys.argv[1])).alone(): os._exit(3)"
    assert subprocess.run([sys.executable, "-c", dies, str(tmp_path / "turns")]).returncode == 3
    with Turns(tmp_path / "turns").together():
        pass


SHARES = """
import os, sys
from pathlib import Path
import numpy
from threadpoolctl import threadpool_info
from kvcompress.compare.turns import Turns, share_of_cores

def threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

before = threads()
with share_of_cores(max(2, os.cpu_count())):
    assert threads() <= {1}
    with Turns(Path(sys.argv[1])).alone():
        assert threads() <= {os.cpu_count()}
    assert threads() <= {1}
with share_of_cores(1), Turns().alone():
    assert threads() == before
"""


def test_products_have_a_share_of_the_cores_and_alone_all_of_them(tmp_path: Path) -> None:
    # In a process of its own: products round otherwise once a library had more threads.
    subprocess.run([sys.executable, "-c", SHARES, str(tmp_path / "turns")], check=True)


@pytest.mark.parametrize(
    ("model", "cores", "cpu", "jobs"),
    [
        ("smollm2-135m", 2, True, 2),
        ("smollm2-135m", 1, True, 1),
        ("smollm2-135m", 2, False, 1),
        ("some/folder", 2, True, 1),
    ],
)
def test_two_rows_at_a_time_where_that_pays(
    model: str, cores: int, cpu: bool, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(load, "only_float32_is_fast", lambda: cpu)
    assert default_jobs(model) == jobs


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, "two"])
def test_a_wrong_number_is_told_at_once(jobs: object, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="compare: jobs must be an integer of at least 1"):
        compare((), model=str(tiny_model), jobs=jobs)  # type: ignore[arg-type]


def test_rows_measured_together_are_those_measured_in_turn(tiny_model: Path) -> None:
    protocol = Protocol(name="brief", context=200, windows=1, scored=64, step=16, decode=2)
    words = ("turboquant", "affine:bits=2")
    one, two = (
        compare(words, model=str(tiny_model), protocol=protocol, jobs=jobs) for jobs in (1, 2)
    )
    assert [row.method for row in two.rows] == [row.method for row in one.rows]
    for first, second in zip(one.rows, two.rows, strict=True):
        assert second.measures["kl"] == pytest.approx(first.measures["kl"], rel=1e-3)
        assert second.measures["resident_bytes"] == first.measures["resident_bytes"]
        assert second.readings["decode_tokens_per_second"] > 0
