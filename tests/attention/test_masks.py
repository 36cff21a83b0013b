from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.attention.masks import apply_mask, check_mask, segment_mask
from kvcompress.errors import ConfigError


def test_causal_mask_hides_nothing_of_what_came_before_the_chunk() -> None:
    assert segment_mask("causal", (range(7),), 4, 10) is None


def test_causal_mask_is_aligned_to_the_lower_right() -> None:
    mask = segment_mask("causal", (range(5, 10),), 4, 10)
    assert mask is not None
    places, queries = np.arange(5, 10), np.arange(6, 10)
    np.testing.assert_array_equal(np.array(mask), queries[:, None] >= places)


def test_array_mask_is_cut_to_spans_with_a_gap() -> None:
    whole = mx.arange(20).reshape(2, 10)
    mask = segment_mask(whole, (range(2), range(7, 10)), 2, 10)
    assert mask is not None
    np.testing.assert_array_equal(np.array(mask), np.array(whole)[:, [0, 1, 7, 8, 9]])


@pytest.mark.parametrize(
    ("mask", "queries", "tokens", "text"),
    [
        ("future", 1, 2, "'future'"),
        ("causal", 3, 2, "2 tokens, 3 queries"),
        (mx.zeros((2, 5)), 2, 6, r"\(2, 6\)"),
        (mx.zeros((3, 6)), 2, 6, r"\(3, 6\)"),
        (mx.array(0.0), 2, 6, r"\(got \(\)\)"),
        (mx.zeros((2, 2, 6)), 2, 6, r"broadcast to \(1, 4, 2, 6\)"),
        (mx.zeros((3, 1, 2, 6)), 2, 6, r"\(3, 1, 2, 6\)"),
        (mx.zeros((1, 1, 1, 2, 6)), 2, 6, r"\(1, 1, 1, 2, 6\)"),
        (mx.zeros((2, 6), mx.complex64), 2, 6, "complex64"),
        (np.zeros((2, 6)), 2, 6, "an array of shape"),
        ([[0.0] * 6] * 2, 2, 6, "None, 'causal' or an array"),
        (True, 2, 6, "got True"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(
    mask: Any, queries: int, tokens: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        check_mask(mask, (1, 4, queries, 8), tokens)


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4), (6, 3, 4), (1, 1, 3, 4), (2, 6, 3, 4)])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_all_ranks_broadcast_as_in_mlx(shape: tuple[int, ...], kind: str) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(2, 6, 3, 4)).astype(np.float32)
    mask = rng.random(shape) > 0.4
    given = mx.array(mask) if kind == "bool" else mx.array(np.where(mask, 0.5, -np.inf))
    grouped = mx.array(scores).reshape(2, 2, 3, 3, 4)
    out = np.array(apply_mask(grouped, given)).reshape(2, 6, 3, 4)
    shown = np.broadcast_to(mask, scores.shape)
    expected = scores if kind == "bool" else scores + 0.5
    np.testing.assert_allclose(out[shown], expected[shown], rtol=1e-6)
    assert (out[~shown] == np.finfo(np.float32).min).all()
