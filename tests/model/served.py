"""A server in a process of its own, which tells on request how much memory it takes.

Run as a program, the first word is ``kvcompress`` or ``mlx_lm.server`` and the others are its own;
each line on stdin asks once.
"""

from __future__ import annotations

import contextlib
import json
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
class Memory:
    """What a server takes, in bytes.

    Attributes:
        active: All arrays that are alive.
        conversations: How many it keeps.
        counted: What mlx-lm counts for them.
        held: What their caches say.
        walked: The arrays found by walking the caches.
    """

    active: int
    conversations: int
    counted: int
    held: int
    walked: int

    @property
    def beside(self) -> int:
        """What is alive beside the conversations: the model, tables, and what was left behind."""
        return self.active - self.walked


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

    def memory(self) -> Memory:
        """What it takes, once it has come to rest."""
        seen: list[Memory] = []
        while len(seen) < 3 or len(set(seen[-3:])) > 1:
            time.sleep(0.1)
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            seen.append(Memory(**json.loads(self.process.stdout.readline())))
        return seen[-1]


@contextlib.contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    """Run a server on a free port until left.

    Args:
        folder: Where to put its log.
        words: ``kvcompress serve`` or ``mlx_lm.server``, and flags.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "server.log"
    command = [sys.executable, "-m", "tests.model.served", *words, "--port", str(port)]
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


def _tell_memory(kept: Any) -> None:
    import mlx.core as mx

    from tests.kept import conversations, walked_bytes

    for _ in sys.stdin:
        caches = [caches for _, caches in conversations(kept)]
        memory = {
            "active": mx.get_active_memory(),
            "conversations": len(caches),
            "counted": kept.nbytes,
            "held": sum(cache.nbytes for each in caches for cache in each),
            "walked": sum(map(walked_bytes, caches)),
        }
        print(json.dumps(memory), flush=True)


def _run(program: str) -> None:
    """Run a program with the words that are left, and tell of what its server keeps."""
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()  # before the next line imports mlx
    import mlx.core as mx
    from mlx_lm import server

    from kvcompress.cli import main

    def kept(size: int) -> Any:
        made = made_by_mlx_lm(size)
        mx.set_cache_limit(0)  # a buffer used again may be larger than what it holds
        threading.Thread(target=_tell_memory, args=(made,), daemon=True).start()
        return made

    made_by_mlx_lm = server.LRUPromptCache
    server.LRUPromptCache = kept
    {"kvcompress": main, "mlx_lm.server": server.main}[program]()


if __name__ == "__main__":
    _run(sys.argv.pop(1))
