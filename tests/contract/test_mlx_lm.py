"""What the caches, the trace and the dispatch rely on in mlx-lm; each failure says what to look at.

mlx-lm writes its cache contract down nowhere, and has changed it before. A failure here means that
the installed version differs from the one that was read; it does not yet mean that anything broke.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten
from mlx_lm import server
from mlx_lm.models import base, rope_utils
from mlx_lm.models import cache as caches
from packaging.requirements import Requirement

import kvcompress
from kvcompress.cache import CompressedKVCache
from kvcompress.cache.batch import CompressedBatchCache
from tests.contract.reading import (
    BATCH,
    CACHE,
    UNWANTED,
    UNWANTED_IN_A_BATCH,
    differences,
    misfits,
    parameters,
)
from tests.stand_ins import cache as stand_in
from tests.zoo import LATER, tiny

generate = importlib.import_module("mlx_lm.generate")  # the package has a function of that name

CALL = "scaled_dot_product_attention"
OURS = Path(kvcompress.__file__).parent
LOOPS = ("generate", "server")  # files beside the models that handle caches

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


# What mlx-lm asks caches for by ``hasattr``: what ours have, what they must not have, and what only
# recurrent states are asked for, whose place ours never take.
HAVE = {"make_mask", "merge"}
HAVE_NOT = {"bits", "keys", "to_quantized"}
RECURRENT = {"advance"}

# What kvcompress.cli.serving extends or reads of the server's classes.
SERVER = {
    "ModelProvider": {
        "__init__": "cli_args",
        "_load": "model_path, adapter_path, draft_model_path",
        "load_default": "",
        "reset": "",
        "draft_model": "",
        "is_batchable": "",
        "is_distributed": "",
        "model": "",
        "_adapter_map": "",
        "_model_map": "",
    },
    "ResponseGenerator": {
        "__init__": "model_provider, prompt_cache",
        "_serve_single": "request, stream",
        "stop_and_join": "",
        "model_provider": "",
        "prompt_cache": "",
    },
}

KINDS = {
    "ArraysCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "TokenBuffer",  # of tokens, no layer's
}


@cache
def model_files() -> dict[str, ast.Module]:
    folder = Path(next(iter(mlx_lm.models.__path__)))
    paths = [*folder.glob("*.py"), *(folder.parent / f"{name}.py" for name in LOOPS)]
    return {path.stem: ast.parse(path.read_text()) for path in sorted(paths)}


@cache
def walked(tree: ast.Module) -> dict[type, list[Any]]:
    found: dict[type, list[Any]] = {}
    for node in ast.walk(tree):
        found.setdefault(type(node), []).append(node)
    return found


def nodes(kind: type) -> Iterator[tuple[str, Any]]:
    for name, tree in model_files().items():
        yield from ((name, node) for node in walked(tree).get(kind, []))


def calls() -> Iterator[tuple[str, ast.Call]]:
    for name, node in nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == CALL:
            yield name, node


def test_the_version_is_one_that_is_claimed() -> None:
    claims = [Requirement(line) for line in importlib.metadata.requires("kvcompress") or ()]
    for package in ("mlx", "mlx-lm"):
        version = importlib.metadata.version(package)
        [claim] = (c.specifier for c in claims if c.name == package and not c.marker)
        assert version in claim, f"{package} {version} is outside {claim}, pyproject.toml's claim"


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
        if node.attr == "update_and_fetch" and name not in ("cache", *LOOPS)
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
    known = {name for name in TAKE_ARRAYS if name not in LATER or name in model_files()}
    assert found == known, (
        f"{sorted(found ^ known)}: most do so in pipelines only; others stay plain, which "
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


def test_a_plain_cache_is_what_was_read() -> None:
    found = differences(caches.KVCache(), CompressedKVCache, CACHE, UNWANTED)
    assert not found, "\n".join(found)


def test_a_batch_cache_is_what_was_read() -> None:
    found = differences(caches.BatchKVCache([0]), CompressedBatchCache, BATCH, UNWANTED_IN_A_BATCH)
    assert not found, "\n".join(found)


def test_our_caches_take_what_was_read() -> None:
    """But for a mask's arguments, which mlx-lm hands on to a function of its own."""
    layer_cache = stand_in()
    for ours, read, unwanted in (
        (layer_cache, CACHE, UNWANTED),
        (CompressedBatchCache([layer_cache]), BATCH, UNWANTED_IN_A_BATCH),
    ):
        kind = type(ours)
        assert not read.keys() - set(dir(ours)), f"{kind.__name__} lacks what mlx-lm calls"
        assert not unwanted.keys() & set(dir(ours)), f"{kind.__name__} has what it must not have"
        for member in read.keys() - {"make_mask"}:
            assert parameters(kind, member) == read[member], f"{kind.__name__}.{member}"
    mask = {"N", "return_array", "window_size"}
    for function, known in (
        (caches.create_attention_mask, {*mask, "offset"}),
        (base.create_causal_mask, {*mask, "offset", "left_padding", "right_padding"}),
    ):
        new = set(inspect.signature(function).parameters) - known
        assert not new, f"{function.__name__} takes {sorted(new)} too: so should our make_mask"


def test_mlx_lm_asks_caches_for_no_attribute_that_was_not_read() -> None:
    """What it finds by ``hasattr`` sends it down another path."""
    asked = {
        node.args[1].value
        for _, node in nodes(ast.Call)
        if isinstance(node.func, ast.Name)
        and node.func.id in ("hasattr", "getattr")
        and isinstance(node.args[1], ast.Constant)
        and re.search(r"\bcaches?\b|\bc\b", ast.unparse(node.args[0]))
    }
    known = HAVE | HAVE_NOT | RECURRENT
    new, gone = asked - known, known - asked
    assert not new, f"mlx-lm asks caches for {sorted(new)}: see what it does with one that has it"
    assert not gone, f"mlx-lm no longer asks caches for {sorted(gone)}: see what it does instead"
    for kind in (CompressedKVCache, CompressedBatchCache):
        members = set(dir(kind))
        assert members >= HAVE, f"{kind.__name__} lacks {sorted(HAVE - members)}"
        astray = members & {*HAVE_NOT, "group_size", "__len__"}
        assert not astray, f"{kind.__name__}: {sorted(astray)} sends mlx-lm down another path"


def test_the_kinds_of_cache_are_known() -> None:
    found = {
        name
        for name, kind in vars(caches).items()
        if isinstance(kind, type) and hasattr(kind, "update_and_fetch") and name[0] != "_"
    }
    found |= {"ArraysCache", "CacheList"} & vars(caches).keys()
    new, gone = found - KINDS, KINDS - found
    assert not new, f"new kinds of cache, {sorted(new)}: say in kvcompress.cache.slot why they stay"
    assert not gone, f"mlx-lm has no {sorted(gone)} any more: see kvcompress.cache.slot"


def test_every_name_that_we_take_from_mlx_lm_is_there_and_takes_our_arguments() -> None:
    wrong = [line for path in sorted(OURS.rglob("*.py")) for line in misfits(path)]
    assert not wrong, "\n".join(wrong)


def test_the_server_has_what_ours_extends() -> None:
    for kind, read in SERVER.items():
        theirs = getattr(server, kind, None)
        assert theirs is not None, (
            f"mlx_lm.server has no {kind} any more: see kvcompress.cli.serving"
        )
        set_there = re.findall(r"self\.(\w+)\b[^=\n]*= ", inspect.getsource(theirs))
        for member, takes in read.items():
            assert member in {*dir(theirs), *set_there}, f"mlx_lm.server.{kind} lacks {member!r}"
            assert parameters(theirs, member) == takes, (
                f"mlx_lm.server.{kind}.{member} takes ({parameters(theirs, member)}), where "
                f"({takes}) was read: see kvcompress.cli.serving"
            )


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
