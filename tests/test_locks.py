from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from kvcompress.locks import one_process


def test_who_waits_says_for_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def waits() -> None:
        with one_process(tmp_path / "lock", "does the same", patience_s=0.05):
            done.set()

    thread = threading.Thread(target=waits)
    with caplog.at_level(logging.WARNING, logger="kvcompress"):
        with FileLock(tmp_path / "lock"):
            thread.start()
            assert not done.wait(0.5)
        thread.join(20)
    assert done.is_set()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("waiting for another process that does the same (it holds ")


def test_who_need_not_wait_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with one_process(tmp_path / "lock", "does the same"):
            pass
    assert caplog.records == []
