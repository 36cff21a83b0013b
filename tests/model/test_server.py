"""The server on the real model, asked by the client that most programs use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from kvcompress.compare.calibrated import HEAD_DIM, KV_HEADS
from kvcompress.text import load_text
from tests.model.served import Server, serving

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
KEPT = 4  # conversations that the server may keep
TOKEN_BYTES = 30 * 2 * KV_HEADS * HEAD_DIM * 4  # of an exact token in all layers
TIDES = "Why are there tides? Answer in two sentences."
BREAD = "How is bread made? Answer in two sentences."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ("--method", "turboquant:bits=4:window=32", "--prompt-cache-size", str(KEPT))
    with serving(tmp_path_factory.mktemp("server"), *words) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=server.url, api_key="none", timeout=120, max_retries=0) as client:
        yield client


def ask(client: Any, words: str, system: str = "", count: int = 24, **more: Any) -> Any:
    messages = [{"role": "user", "content": words}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=count, temperature=0.0, **more
    )


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_a_stream_brings_the_text_piece_by_piece(client: Any) -> None:
    whole = ask(client, TIDES)
    chunks = list(ask(client, TIDES, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text_of(whole)
    assert sum(bool(piece) for piece in pieces) > 5
    assert "tides" in text_of(whole).lower()
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_two_clients_at_once_get_what_each_gets_alone(server: Server, client: Any) -> None:
    together = Barrier(2)

    def one(words: str) -> str:
        with openai.OpenAI(base_url=server.url, api_key="none", timeout=120) as own:
            together.wait()
            return text_of(ask(own, words, count=32))

    with ThreadPoolExecutor(2) as pool:
        at_once = list(pool.map(one, [f"Hello. {TIDES}", f"Hello. {BREAD}"]))
    alone = [text_of(ask(client, f"Hello. {words}", count=32)) for words in (TIDES, BREAD)]
    assert at_once == alone
    assert alone[0] != alone[1]


def test_a_long_prefix_is_read_once(client: Any) -> None:
    system = load_text("prose-eval").content[:1600]
    first = ask(client, "What is this text about?", system, count=16)
    again = ask(client, "What is this text about?", system, count=16)
    other = ask(client, "Who wrote it?", system, count=1)
    assert text_of(first) == text_of(again)
    assert first.usage.prompt_tokens > 300
    assert first.usage.prompt_tokens_details.cached_tokens < 40  # the template's own words
    assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    assert other.usage.prompt_tokens_details.cached_tokens > 300


def talk(client: Any, number: int) -> int:
    """Hold a short conversation; the tokens it took."""
    answer = ask(client, f"{number:03d} is a number. Say hello.", count=2)
    return int(answer.usage.total_tokens)


def forget(client: Any) -> set[int]:
    """Have short conversations take the place of all that the server keeps."""
    return {talk(client, number) for number in range(KEPT + 1)}


def test_a_stream_that_is_dropped_leaves_the_server_serving(server: Server, client: Any) -> None:
    expected = text_of(ask(client, TIDES))
    forget(client)
    before = server.active_bytes()
    for _ in range(3):
        stream = ask(client, "Tell me a very long story.", count=2000, stream=True)
        next(iter(stream))
        stream.close()
    assert text_of(ask(client, TIDES)) == expected
    forget(client)
    assert abs(server.active_bytes() - before) < 20 * TOKEN_BYTES  # each held more than 30


def test_conversations_that_are_over_take_no_memory(server: Server, client: Any) -> None:
    tokens = forget(client)
    before = server.active_bytes()
    tokens |= {talk(client, number) for number in range(100, 130)}
    after = server.active_bytes()
    one = min(tokens) * TOKEN_BYTES  # so few tokens are mostly exact
    assert before > KEPT * one
    assert abs(after - before) < one / 2


def test_a_model_that_cannot_be_had_is_refused_and_the_next_request_served(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(
            model="/no/such/folder", messages=[{"role": "user", "content": "Hello"}]
        )
    assert "model '/no/such/folder': mlx-lm could not load it" in str(caught.value.body)
    assert "tides" in text_of(ask(client, TIDES)).lower()


def test_the_model_that_is_served_is_listed(client: Any) -> None:
    [name] = [model.id for model in client.models.list() if model.id.endswith(MODEL)]
    answer = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": TIDES}], max_tokens=4
    )
    assert answer.usage.completion_tokens == 4


def test_the_log_says_what_is_compressed(server: Server) -> None:
    assert "turboquant on llama: 30 of 30 layers compressed (0-29)" in server.log.read_text()
