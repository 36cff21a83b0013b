"""Speculative decoding: a draft model proposes, the main model's compressed caches are trimmed."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvcompress import attach, get_method, make_cache
from kvcompress.cache import CompressedKVCache
from tests.made_up import METHODS, made_up, words
from tests.toy_model import Near

generate = importlib.import_module("mlx_lm.generate")  # the package has a function of that name

PROMPT = words(90)
# Of the prompt 64 tokens are coded, and no more before there are 1 + 16 + 128 = 145.
FEW_EXACT = {"window": 16, "sinks": 1, "block": 64}
UNTIL_NEXT_BLOCK = 45
DRAFTS = (1, 2, 5, 9)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def pair(request: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its draft model; gemma2 has an attention of its own, which reads dense arrays."""
    return made_up(request.param), made_up(request.param, noise=0.1)


def alone(model: nn.Module, method: Any, count: int) -> tuple[list[int], list[mx.array]]:
    """Greedy tokens of the main model and their log-probabilities."""
    caches = make_cache(method, model)
    steps = generate.generate_step(PROMPT, model, max_tokens=count, prompt_cache=caches)
    pairs = [(int(token), logs) for token, logs in steps]
    return [token for token, _ in pairs], [logs for _, logs in pairs]


def drafted(
    pair: tuple[nn.Module, nn.Module], caches: list[Any] | None, count: int, drafts: int
) -> tuple[list[int], list[mx.array], int]:
    """The same with a draft model, and how many tokens were the draft model's.

    The list of caches is both models', as mlx-lm wants it.
    """
    steps = generate.speculative_generate_step(
        PROMPT, *pair, max_tokens=count, num_draft_tokens=drafts, prompt_cache=caches
    )
    found = [(int(token), logs, bool(draft)) for token, logs, draft in steps]
    return [t for t, _, _ in found], [logs for _, logs, _ in found], sum(d for _, _, d in found)


def both(pair: tuple[nn.Module, nn.Module], method: Any) -> list[Any]:
    """Compressed caches of the main model, then plain ones of the draft model."""
    return make_cache(method, pair[0]) + make_prompt_cache(pair[1])


@pytest.mark.parametrize("name", METHODS)
def test_no_token_changes_while_no_block_grows_old(
    name: str, pair: tuple[nn.Module, nn.Module]
) -> None:
    method = get_method(name, **FEW_EXACT, **METHODS[name])
    wanted, wanted_logs = alone(pair[0], method, UNTIL_NEXT_BLOCK)
    assert len(set(wanted)) > 2
    for drafts in DRAFTS:
        caches, count = both(pair, method), UNTIL_NEXT_BLOCK - drafts
        got, logs, accepted = drafted(pair, caches, count, drafts)
        assert got == wanted[:count]
        assert 0 < accepted < count
        for ours, theirs in zip(logs, wanted_logs, strict=False):
            assert mx.abs(ours - theirs).max() < 1e-3
        if name != "fp16":
            assert {cache.tokens_coded for cache in caches[: len(pair[0].layers)]} == {64}


@pytest.mark.parametrize("name", METHODS)
def test_no_token_changes_under_a_window_over_everything(
    name: str, pair: tuple[nn.Module, nn.Module]
) -> None:
    method = get_method(name, window=200, **METHODS[name])
    wanted, _ = alone(pair[0], method, 60)
    got, _, accepted = drafted(pair, both(pair, method), 60, 3)
    assert got == wanted
    assert 0 < accepted < 60


@pytest.mark.parametrize("window", [-1, 0, 3, 16])
def test_trims_lose_and_repeat_no_token_however_often_blocks_grow_old(
    window: int, pair: tuple[nn.Module, nn.Module]
) -> None:
    method = Near(window=window, sinks=1, block=16)  # loses next to nothing
    wanted, _ = alone(pair[0], method, 40)
    for drafts in (2, 9):
        got, _, accepted = drafted(pair, both(pair, method), 40, drafts)
        assert got == wanted
        assert 0 < accepted < 40


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("window", "block"), [(0, 16), (8, 16), (16, 32)])
def test_no_token_changes_however_often_blocks_grow_old(name: str, window: int, block: int) -> None:
    model, draft = made_up("llama"), made_up("llama", noise=0.1)
    method = get_method(name, window=window, sinks=1, block=block, **METHODS[name])
    wanted, wanted_logs = alone(model, method, 40)
    for drafts in DRAFTS:
        caches = both((model, draft), method)
        got, logs, accepted = drafted((model, draft), caches, 40, drafts)
        assert got == wanted
        assert 0 < accepted < 40
        for ours, theirs in zip(logs, wanted_logs, strict=False):
            assert mx.abs(ours - theirs).max() < 1e-3


def test_an_attached_model_drafts_with_plain_caches() -> None:
    model, draft = made_up("llama"), made_up("llama", noise=0.1)
    method = get_method("turboquant", bits=2, **FEW_EXACT)
    wanted, _ = alone(model, method, 40)
    with attach(model, method):
        assert {type(c) for c in make_prompt_cache(model)} == {CompressedKVCache}
        assert {type(c) for c in make_prompt_cache(draft)} == {KVCache}
        got, _, accepted = drafted((model, draft), None, 40, 3)
    assert got == wanted
    assert accepted


def test_both_models_may_be_compressed() -> None:
    model, draft = made_up("llama"), made_up("llama", noise=0.1)
    method = get_method("turboquant", bits=2, **FEW_EXACT)
    wanted, _ = alone(model, method, 40)
    caches = make_cache(method, model) + make_cache(method, draft)
    assert drafted((model, draft), caches, 40, 3)[0] == wanted
