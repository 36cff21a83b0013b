from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.text.facts import (
    BREAK,
    CUE_TOKENS,
    PASSAGE_TOKENS,
    STEMS,
    RetrievalPrompt,
    build_retrieval_prompt,
)


class WordTokenizer:
    """A token a word or sign with its space before it, digits one by one."""

    def __init__(self, beginning: str = "", joined: bool = False) -> None:
        digits = r" ?\d+" if joined else r" (?=\d)|\d"
        self.pattern = re.compile(rf"<s>|\n|{digits}| ?[^\W\d]+| ?[^\w\s]+|\s|_")
        self.beginning = beginning
        self.words: list[str] = []
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        text = self.beginning * add_special_tokens + text
        ids = []
        for word in self.pattern.findall(text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            ids.append(self.ids[word])
        return ids

    def decode(self, ids: tuple[int, ...] | list[int]) -> str:
        return "".join(self.words[index] for index in ids)


@pytest.fixture(scope="module")
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


def test_the_stems_are_twelve_kinds_of_sentence() -> None:
    assert len(STEMS) == 12
    assert len({" ".join(stem.split()[:2]) for stem in STEMS}) == 12
    assert len({" ".join(stem.split()[-3:]) for stem in STEMS}) == 12


@settings(max_examples=10)
@given(tokens=st.integers(700, 9000), seed=st.integers(0, 2**32))
def test_every_answer_follows_its_stem_once_in_a_context_of_the_length(
    tokenizer: WordTokenizer, tokens: int, seed: int
) -> None:
    prompt = build_retrieval_prompt(tokenizer, tokens, seed)
    text = tokenizer.decode(prompt.context)
    assert len(prompt.context) == tokens
    for fact in prompt.facts:
        assert tokenizer.decode(fact.stem + fact.answer) == BREAK + fact.text[:-1]
        assert re.fullmatch(r"[1-9]\d{3}", tokenizer.decode(fact.answer))
        assert text.count(tokenizer.decode(fact.stem)) == 1
        assert fact.text in text
    passage = tokenizer.decode(prompt.copy_cue).removeprefix(BREAK)
    assert text.startswith(passage + tokenizer.decode(prompt.copy_target))
    assert len(prompt.copy_target) == PASSAGE_TOKENS - CUE_TOKENS


def test_the_facts_are_spread_evenly(tokenizer: WordTokenizer) -> None:
    prompt = build_retrieval_prompt(tokenizer, 4000, seed=3)
    text = tokenizer.decode(prompt.context)
    places = [text.index(fact.text) for fact in prompt.facts]
    gaps = np.diff(places)
    assert places == sorted(places)
    assert gaps.min() > 0.5 * gaps.max()
    assert places[-1] + len(prompt.facts[-1].text) + len("\n\n") == len(text)


def test_a_seed_gives_one_test_and_another_seed_another(tokenizer: WordTokenizer) -> None:
    one = build_retrieval_prompt(tokenizer, 1024, 0)
    assert build_retrieval_prompt(tokenizer, 1024, 0) == one
    other = build_retrieval_prompt(tokenizer, 1024, 1)
    assert other.context[:PASSAGE_TOKENS] != one.context[:PASSAGE_TOKENS]
    assert [fact.text for fact in other.facts] != [fact.text for fact in one.facts]


def test_a_first_token_of_the_models_own_stays_first() -> None:
    tokenizer = WordTokenizer(beginning="<s>")
    prompt = build_retrieval_prompt(tokenizer, 1024)
    text = tokenizer.decode(prompt.context)
    assert text.startswith("<s>")
    assert text.count("<s>") == 1
    assert len(prompt.context) == 1024
    assert "<s>" not in tokenizer.decode(prompt.copy_cue + prompt.facts[0].stem)


def test_numbers_that_are_one_token_with_their_space_work_too() -> None:
    tokenizer = WordTokenizer(joined=True)
    for fact in build_retrieval_prompt(tokenizer, 1024).facts:
        assert len(fact.answer) == 1
        assert tokenizer.decode(fact.stem + fact.answer) == BREAK + fact.text[:-1]


@pytest.mark.parametrize("tokens", [-1, 0, 300, 10**6])
def test_a_length_that_does_not_fit_is_refused(tokenizer: WordTokenizer, tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"tokens must be from \d+ to \d+ \(got {tokens}\)"):
        build_retrieval_prompt(tokenizer, tokens)


def test_the_least_length_that_is_named_works(tokenizer: WordTokenizer) -> None:
    with pytest.raises(ConfigError) as caught:
        build_retrieval_prompt(tokenizer, 0)
    least, most = map(int, re.findall(r"from (\d+) to (\d+)", str(caught.value))[0])
    assert len(build_retrieval_prompt(tokenizer, least).context) == least
    assert len(build_retrieval_prompt(tokenizer, most).context) == most


def scores(model: Any, prompt: RetrievalPrompt) -> tuple[float, float]:
    """Share of answer tokens and of copied tokens that greedy choice gets right."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

    cache = make_prompt_cache(model)
    context = mx.array([prompt.context])
    for start in range(0, context.shape[1], 256):
        model.model(context[:, start : start + 256], cache=cache)
        mx.eval([entry.state for entry in cache])

    def right(stem: tuple[int, ...], target: tuple[int, ...]) -> float:
        ids = mx.array([stem + target[:-1]])
        chosen = model(ids, cache=cache)[0, len(stem) - 1 :].argmax(-1)
        share = (chosen == mx.array(target)).mean().item()
        trim_prompt_cache(cache, ids.shape[1])
        return float(share)

    recall = [right(fact.stem, fact.answer) for fact in prompt.facts]
    return float(np.mean(recall)), right(prompt.copy_cue, prompt.copy_target)


@pytest.mark.model
def test_the_real_model_recalls_and_copies_at_full_precision(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    recall, copied = scores(model, build_retrieval_prompt(tokenizer, 1024))
    assert recall >= 0.9
    assert copied >= 0.9
