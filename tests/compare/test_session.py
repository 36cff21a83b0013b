from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvcompress.compare.memory import (
    active_bytes,
    feed_unevaluated,
    held,
    plain_values,
    walked_bytes,
)
from kvcompress.compare.session import Session
from kvcompress.models import load_model


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    loaded = load_model(str(tiny_model)).model
    mx.eval(loaded.parameters())
    return loaded


def session(model: Any, chunk: int = 16) -> Session:
    return Session(model, make_prompt_cache(model), chunk)


IDS = [int(i) for i in np.random.default_rng(0).integers(320, size=60)]


def whole(model: Any) -> np.ndarray:
    logits = model(mx.array([IDS]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def test_log_probabilities_are_those_of_the_whole_text(model: Any) -> None:
    reader = session(model)
    reader.prefill(IDS[:40])
    steps = list(reader.log_probs(IDS[40:], 4))
    assert [len(rows) for rows in steps] == [4, 4, 4, 4, 4]
    np.testing.assert_allclose(np.concatenate(steps), whole(model)[40:], atol=1e-4)
    assert reader.caches[0].offset == 60
    np.testing.assert_allclose(np.exp(steps[0]).sum(axis=-1), 1, atol=1e-5)


def test_a_branch_leaves_the_sequence_as_it_was(model: Any) -> None:
    reader = session(model)
    reader.prefill(IDS[:40])
    first = reader.branch().predictions(IDS[40:50], 3, 4)
    reader.branch().predictions(IDS[50:], 2, 4)
    again = reader.branch().predictions(IDS[40:50], 3, 4)
    assert (first == again).all()
    np.testing.assert_allclose(first, whole(model)[47:50], atol=1e-4)
    assert reader.caches[0].offset == 40


def test_greedy_takes_the_most_likely_token(model: Any) -> None:
    reader = session(model)
    reader.prefill(IDS[:-1])
    first, second = (int(token.item()) for token in reader.greedy(IDS[-1], 2))
    assert first == whole(model)[-1].argmax()
    logits = model(mx.array([[*IDS, first]]))[0, -1]
    assert second == int(mx.argmax(logits).item())
    assert reader.caches[0].offset == 61


def test_a_walk_finds_what_the_caches_keep_and_no_weights(model: Any) -> None:
    before = active_bytes()
    reader = session(model)
    reader.prefill(IDS)
    own, tables = walked_bytes(reader.caches, model)
    # Two layers of keys and values, two heads of 32 channels in float32, room for 256 tokens.
    assert own == 2 * 2 * 2 * 32 * 4 * 256
    assert tables == 0
    assert own == sum(cache.nbytes for cache in reader.caches)
    # A hidden copy of one layer's keys would add an eighth; a temporary not yet freed adds less.
    assert active_bytes() - before == pytest.approx(own, rel=0.1)


def test_a_hidden_copy_is_found(model: Any) -> None:
    reader = session(model)
    reader.prefill(IDS)
    own, _ = walked_bytes(reader.caches, model)
    reader.caches[0].shadow = {"keys": [mx.zeros((100, 10))]}
    hidden, _ = walked_bytes(reader.caches, model)
    assert hidden - own == 4000


def test_the_values_of_a_plain_cache_are_counted_without_running_the_model(model: Any) -> None:
    assert plain_values(model, 1000) == 1000 * 2 * 2 * 2 * 32
    assert plain_values(model, 1) == 2 * 2 * 2 * 32
    before = active_bytes()
    mx.reset_peak_memory()
    plain_values(model, 100_000)
    assert mx.get_peak_memory() - before < 1_000_000


def test_a_sliding_cache_counts_its_window_alone() -> None:
    from mlx_lm.models.gemma3_text import Model, ModelArgs

    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "head_dim": 16}
    args = ModelArgs(
        model_type="gemma3_text",
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
        sliding_window_pattern=6,
        **sizes,
    )
    model = Model(args)
    caches = make_prompt_cache(model)
    feed_unevaluated(model, caches, 100)
    lengths = [array.shape[2] for array in held(caches)]
    assert lengths == [8] * 10 + [100] * 2
    assert plain_values(model, 100) == (5 * 8 + 100) * 2 * 16
