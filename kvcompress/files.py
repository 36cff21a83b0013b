"""What a path names, whether a file can be written there, and who may write now."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from filelock import FileLock, Timeout

_log = logging.getLogger("kvcompress")


def user_path(path: str | PathLike[str]) -> Path:
    """The path, ``~`` for the home folder; of a user that does not exist it is a name as any."""
    plain = Path(path)
    try:
        return plain.expanduser()
    except RuntimeError:  # as Python calls it
        return plain


def is_file(path: Path) -> bool:
    """Whether it is a file: no error where that cannot be told, as of a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether it is a folder: no error where that cannot be told."""
    try:
        return path.is_dir()
    except OSError:
        return False


def takes_files(folder: Path) -> bool:
    """Whether a folder takes new files; permissions alone do not tell, least of all a root user."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def one_process(lock: Path, work: str, patience_s: float = 2.0) -> Iterator[None]:
    """Let one process at a time do some work, and tell those that wait what they wait for.

    Args:
        lock: The file that is locked.
        work: What is done, as in "waits for a process that ...".
        patience_s: Seconds that one waits before it says so.
    """
    held = FileLock(lock)
    try:
        held.acquire(timeout=patience_s)
    except Timeout:
        _log.warning("waiting for another process that %s (it holds %s)", work, lock)
        held.acquire()
    try:
        yield
    finally:
        held.release()
