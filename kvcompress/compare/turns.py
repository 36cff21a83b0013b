"""Rows that are measured side by side, and what one of them times, which it does alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from attrs import frozen
from threadpoolctl import threadpool_limits

from kvcompress.config.option import shown
from kvcompress.errors import ConfigError
from kvcompress.models.embedded import NAME as EMBEDDED


@frozen
class Turns:
    """Lets processes compute at the same time, but for the one that times something.

    The lock is the operating system's: a process that dies lets the others go on.

    Attributes:
        path: A file that they all lock, or ``None`` where there is one process at a time.
    """

    path: Path | None = None

    def together(self) -> AbstractContextManager[None]:
        """A piece of work during which nothing is timed."""
        return self._locked(alone=False)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """All others wait, once their piece of work is done; every core is this process's."""
        cores = None if self.path is None else os.cpu_count()  # None: leave things as they are
        with self._locked(alone=True), threadpool_limits(cores, "blas"):
            yield

    @contextmanager
    def _locked(self, *, alone: bool) -> Iterator[None]:
        if self.path is None:
            yield
            return
        import fcntl  # not on every system; where there is none, rows run one by one

        with self.path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield


ALONE: Final = Turns()
"""Where nothing else is measured."""


def default_jobs(model: str) -> int:
    """Rows to measure at a time: two on a CPU, whose cores one row does not fill.

    Of the embedded model alone, for others may fill the memory.
    """
    from kvcompress.models.load import only_float32_is_fast

    pays = model == EMBEDDED and (os.cpu_count() or 1) > 1 and only_float32_is_fast()
    return 2 if pays and os.name == "posix" else 1


def check_jobs(jobs: int) -> None:
    """Refuse a number of rows at a time that cannot be.

    Raises:
        ConfigError: It is no positive integer, or more than 1 where files cannot be locked.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise ConfigError(f"compare: jobs must be an integer of at least 1 (got {shown(jobs)})")
    if jobs > 1 and os.name != "posix":
        raise ConfigError(f"compare: jobs must be 1 on this system (got {jobs})")


def share_of_cores(processes: int) -> threadpool_limits:
    """Leave matrix products a core each, or more where there are, so that none waits for others.

    Args:
        processes: Processes that compute at the same time; one alone is left as it is.
    """
    cores = max(1, (os.cpu_count() or 1) // processes) if processes > 1 else None
    return threadpool_limits(cores, "blas")
