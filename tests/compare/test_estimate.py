from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvcompress import get_method, report
from kvcompress.cache.trace import trace
from kvcompress.calibrate import calibrate
from kvcompress.compare.estimate import MOST_TOKENS, Estimator, estimator_of
from kvcompress.compare.memory import memory_measures, walked_bytes
from kvcompress.compare.methods import method_of
from kvcompress.compare.skeleton import skeleton
from kvcompress.errors import CalibrationRequired, ConfigError, UnsupportedModel
from kvcompress.models import load_model
from kvcompress.text import load_text
from tests.compare.tiny import save_tiny_model
from tests.zoo import fields_of, tiny


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load_model(str(tiny_model)).model


@pytest.mark.parametrize("words", [("affine", 4), ("affine", 2), ("turboquant", 3)])
@pytest.mark.parametrize("tokens", [1, 100, 131, 132, 163, 164, 165, 700])
def test_the_estimate_is_what_a_real_cache_stores(
    model: Any, words: tuple[str, int], tokens: int
) -> None:
    method = get_method(words[0], bits=words[1])
    caches = method.make_cache(model)
    model(mx.zeros((1, tokens), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])
    estimate = Estimator(method, model).at(tokens)
    resident, tables = walked_bytes(caches, model)
    assert estimate.sequence_bytes == resident - sum(cache.reserved_bytes for cache in caches)
    assert estimate.table_bytes == tables
    assert estimate.fp16_bytes == tokens * 2 * 2 * 2 * 32 * 2
    assert estimate.plain_bytes == 0


@pytest.mark.parametrize(
    "words", ["rows", "rows:entries=4", "turboquant:centre=calibrated:bits=3", "turboquant"]
)
def test_bytes_are_known_before_a_calibration_is_made(
    strangers: None, tiny_model: Path, model: Any, words: str
) -> None:
    loaded = load_model(str(tiny_model))
    text = load_text("prose-calibration")
    made = calibrate(loaded.model, loaded.tokenizer, text, words, tokens=300)
    before = estimator_of(words, model)
    after = Estimator(method_of(words, made), model)
    assert before.at(700) == after.at(700)
    assert before.largest_context(10**6) == after.largest_context(10**6)
    tables = {"rows": 2 * 2 * 2 * 16 * 32 * 4, "rows:entries=4": 2 * 2 * 2 * 4 * 32 * 4}
    assert before.at(1).table_bytes == tables.get(words, before.at(1).table_bytes)


def test_bytes_that_only_a_calibration_tells_are_a_clear_error(strangers: None, model: Any) -> None:
    with pytest.raises(ConfigError, match="not to its taste") as caught:
        estimator_of("misfit", model)
    assert str(caught.value).startswith("estimate: the bytes of misfit are not known before it is")
    assert str(caught.value).endswith("give it with --calibration")
    with pytest.raises(CalibrationRequired, match="needy: make one"):
        estimator_of("needy", model)


def test_a_calibration_that_is_given_must_hold_the_tables(
    strangers: None, tiny_model: Path, model: Any, tmp_path: Path
) -> None:
    loaded = load_model(str(tiny_model))
    text = load_text("prose-calibration")
    made = calibrate(loaded.model, loaded.tokenizer, text, "rows:entries=4", tokens=300)
    made.subset([]).save(tmp_path / "c")
    with pytest.raises(CalibrationRequired, match="holds no tables"):
        estimator_of("rows", model, str(tmp_path / "c"))


def test_layers_left_alone_are_counted_apart(model: Any) -> None:
    estimate = Estimator(get_method("affine", skip_layers=(1, 0)), model).at(1000)
    whole = Estimator(get_method("affine"), model).at(1000)
    assert estimate.plain_bytes == 1000 * 2 * 2 * 32 * 4
    for part in ("key_bytes", "value_bytes", "exact_bytes"):
        assert getattr(estimate, part) * 2 == getattr(whole, part)


@pytest.mark.parametrize("family", ["falcon_h1", "baichuan_m1"])
def test_bundled_caches_are_counted_by_what_becomes_of_each(family: str) -> None:
    model, method = tiny(family), get_method("turboquant", bits=3, window=16)
    caches = method.make_cache(model)
    for tokens in (499, 1):
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    estimate, counted = Estimator(method, model).at(500), report(caches)
    resident, tables = walked_bytes(caches, model)
    assert resident == counted.resident_bytes + counted.plain_bytes
    assert estimate.plain_bytes == counted.plain_bytes > 0
    assert estimate.sequence_bytes == resident - counted.reserved_bytes
    assert estimate.table_bytes == tables
    assert memory_measures(caches, model, 500)["fp16_bytes"] == estimate.fp16_bytes


def test_full_precision_is_all_plain(model: Any) -> None:
    estimate = Estimator(get_method("fp16"), model).at(500)
    assert estimate.sequence_bytes == estimate.plain_bytes == 2 * estimate.fp16_bytes
    assert estimate.times_smaller == 0.5


@pytest.mark.parametrize("name", ["fp16", "affine"])
def test_the_largest_context_fits_and_a_block_more_does_not(model: Any, name: str) -> None:
    estimator = Estimator(get_method(name), model)
    memory = 3_000_000
    tokens = estimator.largest_context(memory)
    assert estimator.at(tokens).total_bytes <= memory
    assert estimator.at(tokens + 32).total_bytes > memory


def test_the_search_ends(model: Any) -> None:
    estimator = Estimator(get_method("affine"), model)
    assert estimator.largest_context(10) == 0
    assert estimator.largest_context(10**15) == MOST_TOKENS


def test_a_context_of_nothing_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="--context must be at least 1"):
        Estimator(get_method("affine"), model).at(0)


def test_a_skeleton_needs_no_weights_and_reads_none(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "bare", weights=False)
    before = mx.get_active_memory()
    bare = skeleton(str(folder))
    estimate = Estimator(get_method("turboquant", bits=4), bare).at(5000)
    assert mx.get_active_memory() - before < estimate.table_bytes + 10_000
    assert len(make_prompt_cache(bare)) == 2


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3", "gemma3n", "minicpm", "qwen3_vl"])
def test_a_skeleton_is_built_of_families_that_look_for_their_weights(
    family: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields_of(family)))
    slots = trace(skeleton(str(tmp_path), "float32"))
    assert slots == trace(tiny(family))


def test_a_skeleton_has_the_type_that_the_model_would_have(tiny_model: Path) -> None:
    method = get_method("affine")

    def exact(model: Any) -> int:
        return Estimator(method, model).at(100).exact_bytes

    loaded = load_model(str(tiny_model)).model
    assert exact(skeleton(str(tiny_model))) == exact(loaded)
    assert exact(skeleton(str(tiny_model), "float16")) == 100 * 2 * 2 * 2 * 32 * 2
    assert exact(skeleton(str(tiny_model), "float32")) == 100 * 2 * 2 * 2 * 32 * 4


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="mlx-lm could not build it"):
        skeleton(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(UnsupportedModel, match="no_such_family"):
        skeleton(str(tmp_path))
    with pytest.raises(ConfigError, match="dtype must be one of"):
        skeleton(str(tmp_path), "int8")


def test_a_name_that_is_neither_folder_nor_on_the_hub_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(UnsupportedModel, match=r"is no folder, and its config\.json"):
        skeleton("nobody/nothing")
    with pytest.raises(UnsupportedModel, match=r"neither .*, nor a folder, nor a hub name"):
        skeleton("nowhere")  # refused without asking the hub
