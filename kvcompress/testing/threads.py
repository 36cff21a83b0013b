"""Run something in a thread of its own and say how it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_thread(work: Callable[[], object]) -> Exception | None:
    """Run ``work`` in a new thread; what it raised, if anything."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # handed to the thread that asked
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None
