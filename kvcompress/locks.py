"""Work that one process at a time does, while others that want it done wait."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

_log = logging.getLogger("kvcompress")


@contextlib.contextmanager
def one_process(lock: Path, work: str, patience_s: float = 2.0) -> Iterator[None]:
    """Let one process at a time do some work, and tell those that wait what they wait for.

    Args:
        lock: The file that is locked.
        work: What is done, as in "waits for a process that ...".
        patience_s: Seconds that one waits before it says so.
    """
    file = FileLock(lock)
    try:
        held = file.acquire(timeout=patience_s)
    except Timeout:
        _log.warning("waiting for another process that %s (it holds %s)", work, lock)
        held = file.acquire()
    with held:
        yield
