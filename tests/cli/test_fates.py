from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from kvcompress import ConfigError, MethodInfo, hookimpl, registry
from kvcompress.cli.fates import Fate, alike, fates_of
from tests.cli.models import peak
from tests.toy_model import Toy
from tests.zoo import tiny

__all__ = ["peak"]

SLIDING = "RotatingKVCache: its sliding window bounds it"


class NearPlugin:
    """Offers ``near``, which takes any head."""

    @hookimpl
    def kvcompress_register(self, registry: Any) -> None:
        registry.add(MethodInfo("near", "Next to exact.", "tests.toy_model:Near"))


@pytest.fixture(autouse=True)
def near() -> Iterator[None]:
    plugin = NearPlugin()
    registry.register(plugin)
    yield
    registry.unregister(plugin)


def told(words: str, model: Any) -> dict[str, tuple[str, str]]:
    """State and reason by the layers they hold for."""
    fates, _ = fates_of(words, model)
    return {row["layers"]: (row["state"], row["about"]) for row in alike(fates)}


def test_layers_alike_are_one_line() -> None:
    assert told("near", tiny("gemma3_text")) == {
        "0-1, 3-4": ("left", SLIDING),
        "2, 5": ("compressed", "2 key heads of 16 channels, 32.00 bits a number"),
    }


def test_a_layer_that_bundles_caches_has_a_line_for_each_kind() -> None:
    state = ("left", "ArraysCache: it holds a recurrent state, which does not grow")
    model = tiny("falcon_h1")
    fates, _ = fates_of("near", model)
    assert [(row["layers"], row["state"]) for row in alike(fates)] == [
        ("0-3", "left"),
        ("0-3", "compressed"),
    ]
    assert (fates[0].state, fates[0].about) == state
    assert fates[1].about == "2 key heads of 16 channels, 32.00 bits a number"


def test_bits_are_those_that_a_coded_number_takes() -> None:
    [(state, about)] = told(
        "turboquant:bits=2", tiny("llama", head_dim=64, num_key_value_heads=1)
    ).values()
    assert (state, about) == ("compressed", "1 key head of 64 channels, 2.25 bits a number")


def test_attention_that_decodes_is_told() -> None:
    [(state, about)] = told("near", tiny("gemma2")).values()
    assert state == "compressed"
    assert "its attention is the model's own" in about


def test_what_cannot_be_compressed_says_why() -> None:
    [(state, about)] = told("near", tiny("deepseek_v3")).values()
    assert (state, about) == (
        "unsupported",
        "it holds a latent in place of keys and values (MLA)",
    )


def test_a_layer_keeps_its_own_reason_where_the_method_refuses_the_model() -> None:
    rows = told("affine", tiny("gemma3_text"))
    assert rows["0-1, 3-4"] == ("left", SLIDING)
    state, about = rows["2, 5"]
    assert state == "unsupported"
    assert "affine: head_dim must be a multiple of 32 (layer 2 has 16)" in about


def test_skipped_layers_are_left() -> None:
    rows = told("near:skip_layers=1+2", tiny("llama"))
    assert rows["0, 2-3"] == ("left", "skip_layers=1+2")
    assert rows["1"][0] == "compressed"
    [(state, about)] = told("near:skip_layers=2", tiny("llama")).values()
    assert state == "unsupported"
    assert "skip_layers must leave one" in about


def test_a_method_that_keeps_the_model_s_caches_compresses_nothing() -> None:
    [row] = told("fp16", tiny("llama")).values()
    assert row == ("left", "fp16 keeps the model's own caches")


def test_a_method_that_lacks_its_calibration_is_judged_all_the_same(peak: None) -> None:
    fates, note = fates_of("peak", tiny("llama"))
    assert {fate.state for fate in fates} == {"compressed"}
    assert "peak: needs a calibration" in note
    assert "kvcompress calibrate" in note


def test_a_model_that_cannot_be_run_has_no_layers() -> None:
    def broken(x: mx.array, cache: Any, attention: Any) -> mx.array:
        raise RuntimeError("out of order")

    fates, note = fates_of("near", Toy(broken))
    assert fates == []
    assert "out of order" in note


def test_a_mistake_in_the_words_is_an_error() -> None:
    with pytest.raises(ConfigError, match="turboquant: bits must be"):
        fates_of("turboquant:bits=9", tiny("llama"))


def test_nothing_is_logged_and_the_logger_is_left_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "kvcompress"):
        fates_of("near:window=7", tiny("gemma3_text"))
    assert not caplog.records
    assert not logging.getLogger("kvcompress").disabled


def test_runs_of_layers_are_joined() -> None:
    states = ["compressed", "left", "left", "compressed", "left", *["compressed"] * 3]
    rows = alike([Fate(place, state, "so") for place, state in enumerate(states)])
    assert [row["layers"] for row in rows] == ["0, 3, 5-7", "1-2, 4"]
    assert alike([]) == []
