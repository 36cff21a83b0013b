from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.compare.retrieval import retrieval
from kvcompress.compare.session import Session
from kvcompress.models import load_model
from kvcompress.text import Fact, RetrievalPrompt


class Parrot:
    """A model that goes on as the sequence went on after the same token before."""

    def __init__(self, vocabulary: int, deaf: tuple[int, ...] = ()) -> None:
        self.vocabulary = vocabulary
        self.deaf = deaf

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        [memory] = cache
        rows = []
        for token in ids[0].tolist():
            memory.tokens.append(token)
            follows = [b for a, b in pairwise(memory.tokens) if a == token]
            row = np.zeros(self.vocabulary, np.float32)
            if follows and token not in self.deaf:
                row[follows[0]] = 5
            rows.append(row)
        return mx.array(np.array(rows))[None]


class Memory:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def state(self) -> list[mx.array]:
        return []


PROMPT = RetrievalPrompt(
    context=(1, 2, 3, 4, 5, 10, 11, 20, 21, 22),
    facts=(Fact("first", (10,), (11,)), Fact("second", (20,), (21, 22))),
    copy_cue=(1,),
    copy_target=(2, 3, 4, 5),
)


def run(deaf: tuple[int, ...] = ()) -> dict[str, Any]:
    return retrieval(Session(Parrot(30, deaf), [Memory()], chunk=4), PROMPT)


def test_what_was_read_is_found_again() -> None:
    scores = run()
    assert scores["retrieval_tokens"] == 10
    assert scores["retrieval_recall"] == 1
    assert scores["retrieval_copy"] == 1
    each = 5 - np.log(np.exp(5) + 29)
    assert scores["retrieval_copy_log_prob"] == pytest.approx(each)
    assert scores["retrieval_recall_log_prob"] == pytest.approx((each + 2 * each) / 2)


def test_a_fact_with_one_wrong_token_is_lost_and_a_passage_loses_that_token() -> None:
    scores = run(deaf=(21, 3))
    assert scores["retrieval_recall"] == 0.5
    assert scores["retrieval_copy"] == 0.75


def test_every_question_is_put_to_the_same_context(tiny_model: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model = load_model(str(tiny_model)).model

    def scores(prompt: RetrievalPrompt) -> dict[str, Any]:
        return retrieval(Session(model, make_prompt_cache(model), chunk=4), prompt)

    swapped = RetrievalPrompt(PROMPT.context, PROMPT.facts[::-1], (1,), (2, 3, 4, 5))
    assert scores(swapped) == pytest.approx(scores(PROMPT))
