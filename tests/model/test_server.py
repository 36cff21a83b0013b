"""The server on the real model, asked by the client that most programs use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvcompress.text import load_text
from tests.model.clients import (
    KEPT,
    MODEL,
    TOKEN_BYTES,
    ask,
    at_once,
    client_of,
    drop,
    forget,
    streamed,
    talk,
    text_of,
)
from tests.model.served import Server, serving

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.model

METHOD = "turboquant:bits=4:window=32"
TIDES = "Why are there tides? Answer in two sentences."
BREAD = "How is bread made? Answer in two sentences."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ("kvcompress", "serve", "--method", METHOD, "--prompt-cache-size", str(KEPT))
    with serving(tmp_path_factory.mktemp("server"), *words) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


def test_a_stream_brings_the_text_piece_by_piece(client: Any) -> None:
    whole = ask(client, TIDES)
    stream = streamed(client, TIDES)
    assert stream.text == text_of(whole)
    assert len(stream.pieces) > 5
    assert "tides" in stream.text.lower()
    assert stream.usage.completion_tokens == whole.usage.completion_tokens == 24


def test_two_clients_at_once_get_what_each_gets_alone(server: Server, client: Any) -> None:
    questions = [f"Hello. {words}" for words in (TIDES, BREAD)]
    together = [answer.text for answer in at_once(server, questions)]
    alone = [text_of(ask(client, words, count=32)) for words in questions]
    assert together == alone
    assert alone[0] != alone[1]


def test_a_long_prefix_is_read_once(client: Any) -> None:
    system = load_text("prose-eval").content[:1600]
    first = streamed(client, "What is this text about?", system, count=16)
    again = streamed(client, "What is this text about?", system, count=16)
    other = ask(client, "Who wrote it?", system, count=1)
    assert first.text == again.text
    assert first.usage.prompt_tokens > 300
    assert first.usage.prompt_tokens_details.cached_tokens < 40  # the template's own words
    assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    assert other.usage.prompt_tokens_details.cached_tokens > 300


def test_a_stream_that_is_dropped_leaves_the_server_serving(server: Server, client: Any) -> None:
    expected = text_of(ask(client, TIDES))
    forget(client)
    before = server.memory()
    for _ in range(3):
        drop(client)
    assert text_of(ask(client, TIDES)) == expected
    forget(client)
    after = server.memory()
    assert abs(after.active - before.active) < 20 * TOKEN_BYTES  # each held more than 30
    assert abs(after.beside - before.beside) < TOKEN_BYTES


def test_conversations_that_are_over_take_no_memory(server: Server, client: Any) -> None:
    tokens = forget(client)
    before = server.memory()
    tokens |= {talk(client, number) for number in range(100, 130)}
    after = server.memory()
    one = min(tokens) * TOKEN_BYTES  # so few tokens are mostly exact
    assert before.active > KEPT * one
    assert before.walked > KEPT * one / 2
    assert abs(after.active - before.active) < one / 2
    assert abs(after.beside - before.beside) < TOKEN_BYTES


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
