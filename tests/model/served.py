"""``kvcompress`` in a process of its own, which tells on request how much memory MLX's arrays take.

Run as a program, the words are those of ``kvcompress``; each line on stdin asks once.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

START_S = 180  # a slow machine fetches and converts the model first


@frozen
class Server:
    """A server that answers.

    Attributes:
        url: For clients.
        log: What it writes to stderr.
    """

    url: str
    log: Path
    process: Any

    def active_bytes(self) -> int:
        """Bytes of all arrays that are alive, once the server has come to rest."""
        seen = [-1]
        while len(seen) < 4 or len(set(seen[-3:])) > 1:
            time.sleep(0.1)
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            seen.append(int(self.process.stdout.readline()))
        return seen[-1]


@contextlib.contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    """Run ``kvcompress serve`` on a free port until left."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "server.log"
    command = [sys.executable, "-m", "tests.model.served", "serve", "--port", str(port), *words]
    with (
        log.open("w") as err,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as process,
    ):
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield Server(f"http://127.0.0.1:{port}/v1", log, process)
        finally:
            process.kill()


def _wait_for(url: str, process: subprocess.Popen[str], log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url, timeout=10).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")


def _tell_memory() -> None:
    import mlx.core as mx

    for _ in sys.stdin:
        print(mx.get_active_memory(), flush=True)


if __name__ == "__main__":
    from kvcompress.cli import main
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()  # before the thread below imports mlx
    threading.Thread(target=_tell_memory, daemon=True).start()
    main()
