"""What a client asks of a server, with the client that most programs use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from attrs import frozen

from kvcompress.compare.calibrated import HEAD_DIM, KV_HEADS
from tests.model.served import Server

MODEL = "smollm2-135m"
KEPT = 4  # conversations that the server may keep
TOKEN_BYTES = 30 * 2 * KV_HEADS * HEAD_DIM * 4  # of an exact token in all layers


@frozen
class Streamed:
    """An answer that came as a stream.

    Attributes:
        pieces: Its text as it came.
        first_s: Seconds until the first piece.
        usage: The server's count of tokens.
    """

    pieces: Sequence[str]
    first_s: float
    usage: Any

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def client_of(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=server.url, api_key="none", timeout=300, max_retries=0)


def ask(client: Any, words: str, system: str = "", count: int = 24, **more: Any) -> Any:
    messages = [{"role": "user", "content": words}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=count, temperature=0.0, **more
    )


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def streamed(client: Any, words: str, system: str = "", count: int = 24) -> Streamed:
    start = time.perf_counter()
    first_s = 0.0
    pieces, usage = [], None
    more = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in ask(client, words, system, count, **more):
        piece = chunk.choices[0].delta.content if chunk.choices else ""
        if piece:
            first_s = first_s or time.perf_counter() - start
            pieces.append(piece)
        usage = chunk.usage or usage
    return Streamed(pieces, first_s, usage)


def at_once(server: Server, questions: Sequence[str], count: int = 32) -> list[Streamed]:
    """Answers to several clients that ask at the same time."""
    together = Barrier(len(questions))

    def one(words: str) -> Streamed:
        with client_of(server) as own:
            together.wait()
            return streamed(own, words, count=count)

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(one, questions))


def drop(client: Any) -> None:
    """Ask for a long story, and leave at its first word."""
    stream = ask(client, "Tell me a very long story.", count=2000, stream=True)
    next(iter(stream))
    stream.close()


def talk(client: Any, number: int) -> int:
    """Hold a short conversation; the tokens it took."""
    answer = ask(client, f"{number:03d} is a number. Say hello.", count=1)
    return int(answer.usage.total_tokens)


def talks(client: Any, numbers: Sequence[int]) -> None:
    """Hold short conversations, four at a time."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: talk(client, number), numbers))


def forget(client: Any) -> set[int]:
    """Have short conversations take the place of all that the server keeps."""
    return {talk(client, number) for number in range(KEPT + 1)}
