"""What the caches, the trace and the dispatch rely on in mlx-lm; each failure says what to look at.

mlx-lm writes its cache contract down nowhere, and has changed it before. A failure here means that
the installed version differs from the one that was read; it does not yet mean that anything broke.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import base, rope_utils
from mlx_lm.models import cache as caches

from kvcompress.cache import CompressedKVCache
from kvcompress.cache.batch import CompressedBatchCache
from tests.zoo import tiny

generate = importlib.import_module("mlx_lm.generate")  # the package has a function of that name

CALL = "scaled_dot_product_attention"

# Files with an attention of their own, and those that take a cache's arrays past its interface.
OWN_ATTENTION = {"deepseek_v41", "gemma2", "olmo", "plamo2"}
TAKE_ARRAYS = {
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "kimi_k3",
    "minimax_m3_vl",
    "ministral3",
    "mistral4",
    "muse_spark",
    "qwen2",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
}


@cache
def model_files() -> dict[str, ast.Module]:
    folder = Path(next(iter(mlx_lm.models.__path__)))
    return {path.stem: ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))}


def nodes(kind: type) -> Iterator[tuple[str, Any]]:
    for name, tree in model_files().items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, kind))


def calls() -> Iterator[tuple[str, ast.Call]]:
    for name, node in nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == CALL:
            yield name, node


def test_the_version_is_the_one_that_is_claimed() -> None:
    for package in ("mlx", "mlx-lm"):
        version = importlib.metadata.version(package)
        assert version.startswith("0.32."), (
            f"{package} {version}: raise the claim in pyproject.toml"
        )


def test_the_attention_call_takes_what_dispatch_understands() -> None:
    parameters = list(inspect.signature(base.scaled_dot_product_attention).parameters)
    assert parameters == ["queries", "keys", "values", "cache", "scale", "mask", "sinks"], (
        "attention takes other arguments: teach kvcompress.cache.dispatch._understood and "
        "Attends.attend, or they are served by dense arrays"
    )


def test_models_import_the_attention_call_by_name_and_pass_it_known_arguments() -> None:
    importing = {
        name
        for name, node in nodes(ast.ImportFrom)
        if node.module == "base" and any(alias.name == CALL for alias in node.names)
    }
    calling = {name for name, _ in calls()}
    assert calling <= importing, (
        f"{calling - importing}: they do not import {CALL} from base, so its global is another"
    )
    assert len(calling) > 90
    for name, call in calls():
        named = {keyword.arg for keyword in call.keywords}
        assert len(call.args) >= 3, f"{name} names queries, keys or values"
        assert named <= {"cache", "scale", "mask", "sinks"}, f"{name} passes {named}"


def test_the_files_with_an_attention_of_their_own_are_known() -> None:
    fetching = {
        name
        for name, node in nodes(ast.Attribute)
        if node.attr == "update_and_fetch" and name != "cache"
    }
    direct = {
        name
        for name, node in nodes(ast.Attribute)
        if node.attr == CALL and name not in ("base", "muse_spark")  # its vision tower
    }
    found = (fetching - {name for name, _ in calls()}) | direct
    assert found == OWN_ATTENTION, (
        f"{sorted(found ^ OWN_ATTENTION)}: queries are hidden there; the trace sees it by itself, "
        f"so correct this list and the documentation's"
    )


def test_the_files_that_take_a_caches_arrays_are_known() -> None:
    found = {
        name
        for name, node in nodes(ast.Attribute)
        if node.attr in ("keys", "values")
        and name != "cache"
        and "cache" in ast.unparse(node.value)
    }
    assert found == TAKE_ARRAYS, (
        f"{sorted(found ^ TAKE_ARRAYS)}: most do so in pipelines only; others stay plain, which "
        f"the trace sees by itself"
    )


def test_every_rotation_goes_through_mx_fast_rope_looked_up_at_the_call() -> None:
    bound = [
        name
        for name, node in nodes(ast.ImportFrom)
        if (node.module or "").startswith("mlx")
        and any(alias.name == "rope" for alias in node.names)
    ]
    assert not bound, f"{bound}: they bind rope by name, where the trace cannot see it"
    classes = [v for k, v in vars(rope_utils).items() if k.endswith("RoPE") and v is not nn.RoPE]
    for kind in [nn.RoPE, *classes]:
        assert "mx.fast.rope(" in inspect.getsource(kind.__call__), f"{kind}: rotates otherwise"
    by_hand = {
        name
        for name, node in nodes(ast.Attribute)
        if node.attr in ("cos", "sin") and name != "muse_spark"  # its vision tower
    }
    assert not by_hand, f"{by_hand}: may rotate by hand, which the trace takes for no rotation"


def test_the_model_makes_the_caches_wherever_they_are_made() -> None:
    model = tiny("llama")
    model.make_cache = lambda: ["made"]
    assert caches.make_prompt_cache(model) == ["made"]
    assert caches.make_prompt_cache(model, max_kv_size=5) == ["made"]
    assert [type(c) for c in caches.make_prompt_cache(tiny("gpt_neox"))] == [caches.KVCache] * 4


def test_an_attribute_that_is_no_array_is_no_parameter() -> None:
    model = nn.Linear(2, 2)
    names = [name for name, _ in tree_flatten(model.parameters())]
    model.make_cache = object()
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    del model.make_cache
    assert "make_cache" not in vars(model)


def test_a_plain_cache_has_no_member_that_ours_neither_has_nor_must_not_have() -> None:
    theirs = {name for name in dir(caches.KVCache()) if not name.startswith("_")}
    ours = {name for name in dir(CompressedKVCache) if not name.startswith("_")} | {"offset"}
    never = {
        "to_quantized",  # --kv-bits would replace the cache
        "keys",  # a model that takes the arrays keeps its plain cache
        "values",
        "step",
    }
    assert theirs - ours == never, f"KVCache has new members: {sorted(theirs - ours - never)}"
    for name in ("bits", "group_size", "to_quantized", "__len__"):
        assert not hasattr(CompressedKVCache, name), f"{name} sends mlx-lm down another path"


def test_a_batch_cache_has_no_member_that_ours_lacks() -> None:
    theirs = {name for name in dir(caches.BatchKVCache) if not name.startswith("_")}
    ours = {name for name in dir(CompressedBatchCache) if not name.startswith("_")}
    missing = theirs - ours - {"step", "to_quantized"}
    assert not missing, f"BatchKVCache has members that CompressedBatchCache lacks: {missing}"


def test_our_class_names_are_free_in_mlx_lms_loader() -> None:
    for kind in (CompressedKVCache, CompressedBatchCache):
        assert not hasattr(caches, kind.__name__), "load_prompt_cache would build mlx-lm's class"


class Spy(caches.KVCache):  # type: ignore[misc]
    """A plain cache that notes when its state is read and how long the chunks are."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.log.append(keys.shape[2])
        return super().update_and_fetch(keys, values)

    @property
    def state(self) -> Any:
        self.log.append("state")
        return super().state


def test_generation_reads_the_state_after_each_prefill_chunk_and_keeps_the_last_token() -> None:
    model = tiny("llama")
    spies = [Spy() for _ in model.layers]
    steps = generate.generate_step(
        mx.arange(1, 12), model, max_tokens=2, prompt_cache=spies, prefill_step_size=4
    )
    next(steps)
    assert spies[0].log[:7] == [4, "state", 4, "state", 2, "state", 1], (
        "prefill changed: the state is what computes a chunk before the next one"
    )


def test_quantising_asks_the_cache_itself() -> None:
    class NoQuantising:
        offset = 9000

    entries = [NoQuantising(), Spy()]
    generate.maybe_quantize_kv_cache(entries, 0, 64, 8)
    assert type(entries[0]) is NoQuantising
    assert type(entries[1]) is caches.QuantizedKVCache


def test_batches_are_made_by_the_caches_own_merge() -> None:
    class Merging:
        def merge(self, rows: list[Any]) -> tuple[str, int]:
            return "merged", len(rows)

    rows = [[Merging()], [Merging()]]
    assert generate._merge_caches(rows) == [("merged", 2)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "gpt2"])
def test_models_are_called_with_tokens_and_a_list_of_caches(family: str) -> None:
    model = tiny(family)
    names = list(inspect.signature(type(model).__call__).parameters)
    assert names[2] == "cache", f"{family} is called as {names}"
    out = model(mx.zeros((1, 3), mx.int32), cache=caches.make_prompt_cache(model))
    assert out.shape[:2] == (1, 3)
