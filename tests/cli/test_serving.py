from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from attrs import frozen
from mlx_lm import server
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache

import kvcompress as kv
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cli import serving
from kvcompress.errors import ConfigError, UnsupportedModel
from tests.cli.models import tiny_model
from tests.compare import tiny
from tests.kept import conversations, walked_bytes
from tests.made_up import METHODS

__all__ = ["tiny_model"]

METHOD = kv.get_method("turboquant")
PROMPT = "Objects are the data of the language, and all data is objects. " * 2


@frozen
class Answer:
    tokens: list[int]
    prompt: int  # tokens
    reused: int


class Served:
    """What answers the requests of a server, without HTTP."""

    def __init__(self, provider: serving.AttachingProvider) -> None:
        self.provider = provider
        self.kept = LRUPromptCache(4)
        self.generator = serving.WaitingGenerator(provider, self.kept)

    def ask(
        self,
        prompt: str = PROMPT,
        *,
        count: int = 12,
        seed: int | None = None,
        model: str = "default_model",
        adapter: str | None = None,
    ) -> Answer:
        args = server.GenerationArguments(
            model=server.ModelDescription(model, "default_model", adapter),
            sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
            logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
            stop_words=[],
            max_tokens=count,
            num_draft_tokens=3,
            logprobs=False,
            top_logprobs=-1,
            seed=seed,
            chat_template_kwargs=None,
        )
        request = server.CompletionRequest("text", prompt, [], None, None)
        context, answer = self.generator.generate(request, args)
        tokens = [piece.token for piece in answer]
        return Answer(tokens, len(context.prompt), context.prompt_cache_count)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> Iterator[Any]:
    """Start what a command line would, but for HTTP."""
    running: list[Served] = []

    def start(*flags: str, method: str = "turboquant", **options: Any) -> Served:
        chosen = kv.get_method(method, **{"window": 16, **options})
        provider = provider_of(monkeypatch, chosen, "--model", tiny_model, *flags)
        running.append(Served(provider))
        return running[-1]

    yield start
    for served in running:
        served.generator.stop_and_join()


def provider_of(
    monkeypatch: pytest.MonkeyPatch, method: Any, *flags: str
) -> serving.AttachingProvider:
    made: list[serving.AttachingProvider] = []
    monkeypatch.setattr(server, "run", lambda host, port, provider: made.append(provider))
    serving.run_server(method, [*flags, "--port", "0"])
    return made[0]


def kinds(model: Any) -> set[type]:
    return {type(cache) for cache in make_prompt_cache(model)}


def test_flags_reach_the_server_and_the_method_its_model(started: Any) -> None:
    served = started("--prompt-cache-size", "3", "--temp", "0.5")
    assert served.provider.cli_args.prompt_cache_size == 3
    assert served.provider.cli_args.temp == 0.5
    assert kinds(served.provider.model) == {CompressedKVCache}
    assert served.provider.is_batchable


def test_mlx_lm_is_left_as_it_was(started: Any) -> None:
    before = (server.ModelProvider, server.ResponseGenerator)
    started()
    assert (server.ModelProvider, server.ResponseGenerator) == before
    assert server.ModelProvider is not serving.AttachingProvider


def test_a_window_beyond_the_text_serves_what_the_model_says_alone(
    started: Any, tiny_model: str
) -> None:
    from kvcompress.models import load_model

    loaded = load_model(tiny_model)
    ids = loaded.tokenizer.encode(PROMPT)
    expected = []
    for _ in range(12):
        expected.append(int(mx.argmax(loaded.model(mx.array([ids + expected]))[0, -1]).item()))
    for seed in (None, 1):  # in batches, and one by one
        assert started(window=500).ask(seed=seed).tokens == expected


@pytest.mark.parametrize("seed", [None, 1])
def test_a_prompt_that_is_asked_again_is_not_read_again(started: Any, seed: int | None) -> None:
    served = started()
    first = served.ask(seed=seed)
    again = served.ask(seed=seed)
    assert (first.reused, again.reused) == (0, first.prompt - 1)
    assert first.tokens == again.tokens


@pytest.mark.parametrize("method", METHODS)
def test_kept_conversations_are_compressed_and_counted_at_their_size(
    started: Any, method: str
) -> None:
    served = started(method=method, **METHODS[method])
    for topic in ("Names", "Classes", "The yield"):
        served.ask(f"{topic}. {PROMPT}")
    kept = conversations(served.kept)
    assert len(kept) == 3
    for tokens, caches in kept:
        assert {cache.offset for cache in caches} == {len(tokens)}
        if method != "fp16":
            assert {type(cache) for cache in caches} == {CompressedKVCache}
            assert all(cache.store.tokens >= 32 for cache in caches)
    ours = sum(cache.nbytes for _, caches in kept for cache in caches)
    walked = sum(walked_bytes(caches) for _, caches in kept)
    assert served.kept.nbytes == ours == walked > 0


def test_the_limit_of_bytes_counts_what_is_kept(started: Any) -> None:
    served = started("--prompt-cache-bytes", "0.08MB")
    for topic in ("Names", "Classes", "The yield", "Objects"):
        served.ask(f"{topic}. {PROMPT}")  # some 49 kB; what is over the limit goes as one comes
    assert len(served.kept) == 2


def test_a_conversation_that_goes_on_shares_its_tables(started: Any) -> None:
    served = started()
    served.ask()
    [(tokens, kept)] = conversations(served.kept)
    copies, _ = served.kept.fetch_nearest_cache(served.provider.model_key, [*tokens, 5])
    assert all(a is not b and a.codec is b.codec for a, b in zip(copies, kept, strict=True))


def test_a_model_that_a_request_names_gets_the_method_too(started: Any, tmp_path: Path) -> None:
    other = str(tiny.save_tiny_model(tmp_path / "other"))
    served = started()
    expected = served.ask()
    assert served.ask(model=other).tokens == expected.tokens  # it has the same weights
    assert served.provider.model_key[0] == other
    assert kinds(served.provider.model) == {CompressedKVCache}


def test_a_model_that_the_method_cannot_serve_is_refused_each_time(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(tiny.CONFIG, "num_hidden_layers", 1)
        small = str(tiny.save_tiny_model(tmp_path / "small"))
    served = started(skip_layers=(1, 0))
    expected = served.ask().tokens
    for _ in range(2):
        with pytest.raises(ConfigError, match="skip_layers must leave one of the 1 layers"):
            served.ask(model=small)
    assert served.ask().tokens == expected


def test_a_model_that_is_none_is_refused_in_one_line(started: Any, tmp_path: Path) -> None:
    served = started()
    with pytest.raises(UnsupportedModel, match="mlx-lm could not load it") as caught:
        served.ask(model=str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert served.ask(count=1).tokens


def test_adapters_are_served_with_the_method(started: Any, tiny_model: str, tmp_path: Path) -> None:
    lora = {"rank": 2, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.v_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": lora}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "model.layers.{}.self_attn.v_proj.lora_{}"
    weights = {name.format(layer, "a"): mx.ones((64, 2)) for layer in range(2)}
    weights |= {name.format(layer, "b"): mx.random.normal((2, 64)) for layer in range(2)}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    served = started()
    plain = served.ask().tokens
    adapted = served.ask(model=tiny_model, adapter=str(tmp_path)).tokens
    assert adapted != plain
    assert kinds(served.provider.model) == {CompressedKVCache}
    assert served.ask().tokens == plain
    by_flag = started("--adapter-path", str(tmp_path))
    assert by_flag.ask().tokens == adapted


def test_a_draft_model_changes_no_text_and_keeps_its_own_caches(
    started: Any, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = started(window=500).ask(count=40).tokens
    served = started("--draft-model", tiny_model, window=500)
    assert not served.provider.is_batchable
    seen: list[Any] = []
    monkeypatch.setattr(served.kept, "insert_cache", lambda *words: seen.append(words[-1]))
    assert served.ask(count=40).tokens == expected
    [caches] = seen
    assert [type(cache) for cache in caches] == [CompressedKVCache] * 2 + [KVCache] * 2


def test_beside_a_draft_model_nothing_is_taken_over(started: Any, tiny_model: str) -> None:
    served = started("--draft-model", tiny_model)
    first = served.ask(count=40)
    again = served.ask(count=40)
    assert (first.reused, again.reused, len(served.kept)) == (0, 0, 0)
    assert first.tokens == again.tokens


def test_drafts_that_are_taken_back_leave_codes_alone(
    started: Any, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = started("--draft-model", tiny_model)
    seen: list[Any] = []
    monkeypatch.setattr(served.kept, "insert_cache", lambda *words: seen.append(words[-1]))
    assert len(served.ask(count=60).tokens) == 60
    for cache in seen[0][:2]:
        assert 32 <= cache.store.tokens == cache.coded_at(cache.offset)


def test_a_default_model_that_fails_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads = set(threading.enumerate())
    provider = provider_of(monkeypatch, METHOD, "--model", str(tmp_path))
    with pytest.raises(UnsupportedModel, match="mlx-lm could not load it"):
        Served(provider)
    assert set(threading.enumerate()) == threads


def test_the_embedded_model_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tiny_model: str
) -> None:
    monkeypatch.setattr(serving, "ensure_demo_model", lambda: Path(tiny_model))
    flags = ("--model", serving.EMBEDDED, "--adapter-path", "mine")
    provider = provider_of(monkeypatch, METHOD, *flags)
    loaded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(provider, "_load", lambda *key: loaded.append(key))
    provider.load_default()
    provider.load(serving.EMBEDDED, None, "default_model")
    assert loaded == [(tiny_model, "mine", None)] * 2


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    class Pair:
        def size(self) -> int:
            return 2

    monkeypatch.setattr(mx.distributed, "init", Pair)
    with pytest.raises(ConfigError, match="serve: cannot serve from several processes"):
        provider_of(monkeypatch, METHOD, "--model", tiny_model)


def test_a_list_of_models_needs_a_folder_for_them(
    monkeypatch: pytest.MonkeyPatch, tiny_model: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(serving, "HF_HUB_CACHE", str(tmp_path / "hub"))
    provider_of(monkeypatch, METHOD, "--model", tiny_model)
    assert (tmp_path / "hub").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(serving, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    provider_of(monkeypatch, METHOD, "--model", tiny_model)
