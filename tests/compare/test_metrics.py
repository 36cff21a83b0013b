from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.compare.metrics import (
    METRICS,
    Metric,
    Tally,
    agreement,
    block_error,
    divergence,
    nll,
)
from kvcompress.errors import KVCompressError


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32)


def draw(seed: int, tokens: int = 7, vocabulary: int = 50, noise: float = 0.3):
    chance = np.random.default_rng(seed)
    logits = chance.normal(size=(tokens, vocabulary)) * 3
    full = log_softmax(logits)
    method = log_softmax(logits + noise * chance.normal(size=logits.shape))
    return full, method, chance.integers(vocabulary, size=tokens)


@given(st.integers(0, 10_000), st.floats(0.01, 3))
def test_divergence_is_the_sum_over_the_vocabulary(seed: int, noise: float) -> None:
    full, method, targets = draw(seed, noise=noise)
    brute = [
        sum(np.exp(float(p)) * (float(p) - float(q)) for p, q in zip(a, b, strict=True))
        for a, b in zip(full, method, strict=True)
    ]
    np.testing.assert_allclose(divergence(full, method, targets), brute, rtol=1e-4, atol=1e-7)
    assert (divergence(full, method, targets) > 0).all()


def test_divergence_of_a_distribution_from_itself_is_nothing() -> None:
    full, _, targets = draw(0)
    assert (divergence(full, full, targets) == 0).all()


def test_a_small_divergence_keeps_its_digits() -> None:
    full, method, targets = draw(1, vocabulary=50_000, noise=0.01)
    exact = full.astype(np.float64)
    shift = np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    other = method.astype(np.float64)
    other -= np.log(np.exp(other).sum(axis=-1, keepdims=True))
    brute = (np.exp(exact - shift) * (exact - shift - other)).sum(axis=-1)
    assert brute.max() < 1e-3
    np.testing.assert_allclose(divergence(full, method, targets), brute, atol=3e-7)


def test_a_token_that_the_model_rules_out_adds_nothing() -> None:
    full = log_softmax(np.array([[0.0, 1.0, -np.inf]]))
    method = log_softmax(np.array([[0.0, 1.0, -np.inf]]))
    assert divergence(full, method, np.array([0])) == 0


def test_likelihood_and_agreement() -> None:
    full = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=np.float32))
    method = np.log(np.array([[0.3, 0.5, 0.2], [0.2, 0.2, 0.6]], dtype=np.float32))
    targets = np.array([1, 2])
    np.testing.assert_allclose(nll(full, targets), [-np.log(0.3), -np.log(0.7)], rtol=1e-6)
    assert agreement(full, method, targets).tolist() == [0, 1]


def test_the_tally_does_not_depend_on_how_tokens_arrive() -> None:
    full, method, targets = draw(2, tokens=96)

    def summary(step: int) -> dict[str, float | None]:
        tally = Tally(METRICS)
        tally.start_window()
        for i in range(0, 96, step):
            tally.add(full[i : i + step], method[i : i + step], targets[i : i + step])
        return tally.summary()

    whole = summary(96)
    assert whole["nll_change"] == pytest.approx((nll(method, targets) - nll(full, targets)).mean())
    assert whole["perplexity"] == pytest.approx(np.exp(nll(method, targets).mean()))
    for step in (1, 5, 32):
        assert summary(step) == pytest.approx(whole)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=4), st.integers(0, 100))
def test_the_block_error_is_that_of_the_means_of_blocks(lengths: list[int], seed: int) -> None:
    chance = np.random.default_rng(seed)
    windows = [chance.normal(size=n) for n in lengths]
    means = []
    for series in windows:
        blocks = -(-len(series) // 32)
        means += [np.mean(part) for part in np.array_split(series, blocks)]
    error = block_error(windows)
    if len(means) < 2:
        assert error is None
    else:
        centre = sum(means) / len(means)
        variance = sum((m - centre) ** 2 for m in means) / (len(means) - 1)
        assert error == pytest.approx((variance / len(means)) ** 0.5)


def test_the_block_error_sees_that_neighbours_agree() -> None:
    repeated = np.repeat(np.random.default_rng(0).normal(size=32), 32)
    naive = repeated.std(ddof=1) / np.sqrt(len(repeated))
    error = block_error([repeated])
    assert error is not None
    assert error > 4 * naive


def test_a_broken_output_is_named_and_not_averaged() -> None:
    full, method, targets = draw(3)
    method[2, 5] = np.nan
    tally = Tally(METRICS)
    tally.start_window()
    with pytest.raises(KVCompressError, match="kl: not finite"):
        tally.add(full, method, targets)


def test_a_metric_of_the_wrong_shape_is_named() -> None:
    full, method, targets = draw(4)
    tally = Tally({"odd": Metric("odd", lambda f, m, t: f.sum(), "")})
    tally.start_window()
    with pytest.raises(KVCompressError, match=r"metric odd: must give one number a token, shape"):
        tally.add(full, method, targets)
