"""What mlx-lm's own functions and loops do with prompt caches holds for every method's.

Each behaviour is that of mlx-lm's plain caches, asked of all methods: the plain ones, ``fp16``,
stand among them.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    LRUPromptCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from kvcompress import attach, get_method, list_methods, load_cache, make_cache, save_cache
from kvcompress.cache import CompressedKVCache
from kvcompress.cache.batch import CompressedBatchCache
from kvcompress.cache.native import native_caches
from kvcompress.cache.nested import leaves
from tests.made_up import METHODS, made_up, words
from tests.zoo import tiny

generate = importlib.import_module("mlx_lm.generate")  # the package has a function of that name

# Of 90 tokens 64 are coded, and no more before there are 145.
OPTIONS = {"window": 16, "sinks": 1, "block": 64}
PROMPT = words(90)
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return made_up("llama")


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    return get_method(request.param, **OPTIONS, **METHODS[request.param])


def test_every_method_is_here() -> None:
    own = {row.name for row in list_methods() if row.distribution == "kvcompress"}
    assert own == set(METHODS)


def fed(method: Any, model: nn.Module, tokens: mx.array = PROMPT) -> list[Any]:
    """Caches after a prompt."""
    made = make_cache(method, model)
    if tokens.size:
        mx.eval(model(tokens[None], cache=made))
    return made


def greedy(model: nn.Module, held: list[Any], count: int, first: int = 1) -> list[int]:
    """``count`` tokens after ``first``, by mlx-lm's loop, one at a time."""
    steps = generate.generate_step(
        mx.array([first]), model, max_tokens=count, prompt_cache=held, prefill_step_size=32
    )
    return [int(token) for token, _ in steps]


def step(model: nn.Module, held: Sequence[Any], tokens: Any) -> mx.array:
    """Logits of the last of some tokens, ``(B, vocabulary)``."""
    out = model(mx.array(tokens), cache=held)[:, -1]
    mx.eval(out)
    return out


def assert_alike(got: mx.array, wanted: mx.array) -> None:
    assert got.shape == wanted.shape
    assert float(mx.abs(got - wanted).max()) < TOLERANCE
    assert float(mx.abs(wanted).max()) > 0.1


def holds_codes(held: Sequence[Any], count: int = 64) -> bool:
    """Whether every compressed cache among them holds so many codes."""
    return all(c.tokens_coded == count for c in held if isinstance(c, CompressedKVCache))


# -- trimming and copying --------------------------------------------------------------------------


def test_trimming_says_how_many_went_and_takes_no_more_than_there_are(
    method: Any, model: nn.Module
) -> None:
    held, plain = fed(method, model), native_caches(model)
    mx.eval(model(PROMPT[None], cache=plain))
    for count in (0, 7, 80, 1, 90, 5):  # within the window, into the codes, over the end
        assert can_trim_prompt_cache(held)
        assert trim_prompt_cache(held, count) == trim_prompt_cache(plain, count)
        assert {c.offset for c in held} == {c.offset for c in plain} == {held[0].size()}
        assert all(c.empty() == (c.offset == 0) for c in held if type(c) is not KVCache)
    assert trim_prompt_cache([], 3) == 0
    assert_alike(step(model, held, [[5, 9, 2]]), step(model, plain, [[5, 9, 2]]))


def test_an_answer_that_is_taken_back_is_given_again(method: Any, model: nn.Module) -> None:
    held = fed(method, model)
    first = greedy(model, held, 30)
    assert len(set(first)) > 2
    assert trim_prompt_cache(held, held[0].offset - 90) > 0
    assert holds_codes(held)
    assert greedy(model, held, 30) == first


def test_a_copy_and_its_original_go_on_apart(method: Any, model: nn.Module) -> None:
    held = fed(method, model)
    other = copy.deepcopy(held)
    assert not set(map(id, held)) & set(map(id, other))
    wanted = {first: greedy(model, fed(method, model), 12, first) for first in (3, 40)}
    assert wanted[3] != wanted[40]
    assert greedy(model, other, 12, 40) == wanted[40]
    assert greedy(model, held, 12, 3) == wanted[3]


def test_an_empty_list_of_caches_can_be_copied_trimmed_and_asked(
    method: Any, model: nn.Module
) -> None:
    held = copy.deepcopy(make_cache(method, model))
    assert all(c.empty() and not c.size() and not c.nbytes for c in held)
    assert trim_prompt_cache(held, 4) == 0
    assert greedy(model, held, 5) == greedy(model, make_cache(method, model), 5)


# -- files -----------------------------------------------------------------------------------------


def test_a_file_holds_caches_metadata_and_nothing_else(
    method: Any, model: nn.Module, tmp_path: Path
) -> None:
    held = fed(method, model)
    if method.name == "fp16":
        save_prompt_cache(str(tmp_path / "a.safetensors"), held, {"of": "me"})
        again, metadata = load_prompt_cache(str(tmp_path / "a.safetensors"), True)
        assert metadata == {"of": "me"}
    else:
        save_cache(tmp_path / "a.safetensors", held, {"of": "me"})
        again = load_cache(tmp_path / "a.safetensors", model)
    assert [c.offset for c in again] == [90] * len(held)
    assert trim_prompt_cache(again, 5) == trim_prompt_cache(held, 5) == 5
    assert greedy(model, again, 20) == greedy(model, held, 20)


def test_mlx_lms_writer_takes_the_state_and_its_loader_builds_no_other_class(
    method: Any, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, held = str(tmp_path / "a.safetensors"), fed(method, model)
    save_prompt_cache(path, held)
    kind = type(held[0])
    if kind is not KVCache:
        with pytest.raises(KeyError, match=kind.__name__):
            load_prompt_cache(path)
    monkeypatch.setattr(caches, kind.__name__, kind, raising=False)
    again = load_prompt_cache(path)
    assert [type(c) for c in again] == [kind] * len(held)
    assert greedy(model, again, 20) == greedy(model, held, 20)


@pytest.mark.parametrize("family", ["falcon_h1", "baichuan_m1", "minimax_m3_vl"])
def test_bundled_caches_go_through_mlx_lms_files_and_copies_as_single_ones_do(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundling, method = made_up(family), get_method("turboquant", bits=2, **OPTIONS)
    held = fed(method, bundling)
    assert holds_codes(leaves(held))
    path, wanted = str(tmp_path / "a.safetensors"), greedy(bundling, copy.deepcopy(held), 20)
    save_prompt_cache(path, held)
    with pytest.raises(KeyError, match="CompressedKVCache"):
        load_prompt_cache(path)
    monkeypatch.setattr(caches, "CompressedKVCache", CompressedKVCache, raising=False)
    again = load_prompt_cache(path)
    assert [type(c) for c in again] == [CacheList] * len(held)
    assert [type(c) for c in leaves(again)] == [type(c) for c in leaves(held)]
    kept = LRUPromptCache(4)
    kept.insert_cache("m", PROMPT.tolist(), held)
    found, _ = kept.fetch_nearest_cache("m", PROMPT.tolist())
    for each in (again, found, held):
        assert greedy(bundling, each, 20) == wanted


CHILD = """
import json, sys
from kvcompress import load_cache
from tests.contract.test_prompt_caches import greedy, made_up
model, out = made_up("llama"), {}
for path in sys.argv[1:]:
    out[path] = greedy(model, load_cache(path, model), 20)
print(json.dumps(out))
"""


def test_another_process_goes_on_from_files_of_every_method(
    model: nn.Module, tmp_path: Path
) -> None:
    wanted = {}
    for name in METHODS.keys() - {"fp16"}:
        held = fed(get_method(name, **OPTIONS, **METHODS[name]), model)
        path = tmp_path / f"{name}.safetensors"
        save_cache(path, held)
        wanted[str(path)] = greedy(model, held, 20)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *wanted],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert json.loads(done.stdout) == wanted


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 30])
def test_masks_are_those_of_a_plain_cache(method: Any, model: nn.Module, count: int) -> None:
    held, plain = fed(method, model, PROMPT[:count])[0], KVCache()
    plain.offset = count
    for size in (1, 2, 9):
        for as_array in (True, False):
            for window in (None, 4):
                asked = {"return_array": as_array, "window_size": window}
                got, wanted = (cache.make_mask(size, **asked) for cache in (held, plain))
                assert type(got) is type(wanted)
                assert mx.array_equal(got, wanted) if isinstance(got, mx.array) else got == wanted


@pytest.mark.parametrize("window", [None, 4])
def test_masks_of_a_batch_are_those_of_a_plain_batch(
    method: Any, model: nn.Module, window: int | None
) -> None:
    merged = merge(method, model, (30, 7, 0))[0]
    plain = caches.BatchKVCache.merge([held(30), held(7), held(0)])
    for size in (1, 5):
        got, wanted = (
            np.array(cache.make_mask(size, window_size=window)) for cache in (merged, plain)
        )
        assert got.shape == wanted.shape
        seen = np.broadcast_to(wanted.any(-1, keepdims=True), wanted.shape)
        np.testing.assert_array_equal(got[seen], wanted[seen])
    assert mx.array_equal(merged.offset, plain.offset)


def held(count: int) -> KVCache:
    """A plain cache of so many tokens."""
    cache = KVCache()
    if count:
        cache.update_and_fetch(*[mx.zeros((1, 2, count, 64))] * 2)
    return cache


# -- batches ---------------------------------------------------------------------------------------

LENGTHS = (90, 30, 83, 5)


def merge(method: Any, model: nn.Module, lengths: Sequence[int] = LENGTHS) -> list[Any]:
    """A batch of prompts of these lengths."""
    rows = [fed(method, model, words(n, seed=n)) for n in lengths]
    return list(generate._merge_caches(rows))


def apart(method: Any, model: nn.Module, lengths: Sequence[int], tokens: Any) -> list[mx.array]:
    """Logits of each of some tokens, ``(rows, steps)``, every row alone."""
    out = []
    for count, row in zip(lengths, tokens, strict=True):
        caches_of_row = fed(method, model, words(count, seed=count))
        out.append([step(model, caches_of_row, [[token]]) for token in row])
    return [mx.concatenate(column) for column in zip(*out, strict=True)]


def test_a_batch_stays_compressed_and_its_rows_are_as_if_alone(
    method: Any, model: nn.Module
) -> None:
    merged = merge(method, model)
    kind = caches.BatchKVCache if method.name == "fp16" else CompressedBatchCache
    assert {type(c) for c in merged} == {kind}
    for name in ("bits", "group_size", "to_quantized", "__len__"):
        assert kind is not CompressedBatchCache or not hasattr(merged[0], name)
    tokens = [[3, 7], [9, 1], [4, 4], [60, 2]]
    wanted = apart(method, model, LENGTHS, tokens)
    for i, expected in enumerate(wanted):
        assert_alike(step(model, merged, [[row[i]] for row in tokens]), expected)
    assert {tuple(c.offset.tolist()) for c in merged} == {tuple(n + 2 for n in LENGTHS)}


def test_rows_that_leave_a_batch_leave_the_others_as_they_were(
    method: Any, model: nn.Module
) -> None:
    merged = merge(method, model)
    step(model, merged, [[3], [9], [4], [60]])
    for cache in merged:
        cache.filter(mx.array([2, 1]))
    wanted = apart(method, model, (83, 30), [[4, 8], [9, 8]])[1]
    assert_alike(step(model, merged, [[8], [8]]), wanted)
    for cache in merged:
        cache.filter([1])
    wanted = apart(method, model, (30,), [[9, 8, 5]])[2]
    assert_alike(step(model, merged, [[5]]), wanted)


def test_rows_that_join_a_batch_are_as_if_alone(method: Any, model: nn.Module) -> None:
    merged, others = merge(method, model, (30, 5)), merge(method, model, (90, 83))
    step(model, merged, [[3], [9]])
    for cache, other in zip(merged, others, strict=True):
        cache.extend(other)
    assert merged[0].offset.tolist() == [31, 6, 90, 83]
    wanted = apart(method, model, (30, 5), [[3, 8], [9, 8]])[1]
    later = apart(method, model, (90, 83), [[8], [8]])[0]
    assert_alike(step(model, merged, [[8]] * 4), mx.concatenate([wanted, later]))


def test_a_row_that_is_taken_out_goes_on_alone_and_the_batch_without_it(
    method: Any, model: nn.Module
) -> None:
    merged = merge(method, model)
    step(model, merged, [[3], [9], [4], [60]])
    out = [cache.extract(0) for cache in merged]
    assert [type(c) for c in out] == [type(c) for c in make_cache(method, model)]
    assert holds_codes(out)
    alone = fed(method, model, words(90, seed=90))
    step(model, alone, [[3]])
    assert greedy(model, out, 12) == greedy(model, alone, 12)
    wanted = apart(method, model, LENGTHS, [[3, 8], [9, 8], [4, 8], [60, 8]])[1]
    assert_alike(step(model, merged, [[8]] * 4), wanted)


def test_a_batch_is_trimmed_row_by_row(method: Any, model: nn.Module) -> None:
    merged = merge(method, model)
    step(model, merged, [[3], [9], [4], [60]])
    assert all(c.is_trimmable() for c in merged)
    assert {c.trim(1) for c in merged} == {1}
    assert merged[0].offset.tolist() == list(LENGTHS)
    wanted = apart(method, model, LENGTHS, [[8]] * 4)[0]
    assert_alike(step(model, merged, [[8]] * 4), wanted)


def test_a_fresh_batch_takes_padded_prompts(method: Any, model: nn.Module) -> None:
    """Prompts padded at the right, as mlx-lm reads them; none of the padding is remembered."""
    lengths = [40, 33, 5]
    prompts = [words(n, seed=n) for n in lengths]
    merged = merge(method, model, (0, 0, 0))
    assert all(c.empty() for c in merged)
    assert method.name == "fp16" or {type(c) for c in merged} == {CompressedBatchCache}
    for cache in merged:
        cache.prepare(lengths=lengths, right_padding=[40 - n for n in lengths])
    rows = [mx.pad(p, (0, 40 - p.size)) for p in prompts]
    mx.eval(model(mx.stack(rows), cache=merged))
    for cache in merged:
        cache.finalize()
    assert merged[0].offset.tolist() == lengths
    wanted = apart(method, model, lengths, [[8]] * 3)[0]
    assert_alike(step(model, merged, [[8]] * 3), wanted)


def test_the_batch_generator_serves_each_prompt_as_if_alone(method: Any, model: nn.Module) -> None:
    """Prompts that come at different times, some with a conversation behind them."""
    prompts = [words(n, seed=n).tolist() for n in (70, 20, 3)]
    earlier = fed(method, model, words(90, seed=90))
    wanted = []
    for tokens, start in zip(prompts, (None, None, words(90, seed=90)), strict=True):
        alone = make_cache(method, model) if start is None else fed(method, model, start)
        steps = generate.generate_step(
            mx.array(tokens), model, max_tokens=8, prompt_cache=alone, prefill_step_size=32
        )
        wanted.append([int(token) for token, _ in steps])
    with attach(model, method):
        generator = generate.BatchGenerator(model, max_tokens=8, prefill_step_size=32)
        [first] = generator.insert(prompts[:1])
        got: dict[int, list[int]] = {first: []}
        last: dict[int, Any] = {}
        kinds: set[type] = set()
        while len(last) < 3:
            for response in generator.next_generated():
                got[response.uid].append(response.token)
                if response.finish_reason:
                    last[response.uid] = response.prompt_cache
            kinds |= {type(c) for c in generator._generation_batch.prompt_cache}
            if len(got) == 1 and len(got[first]) == 2:
                second = generator.insert(prompts[1:2])
                third = generator.insert(prompts[2:], caches=[earlier])
                got |= {second[0]: [], third[0]: []}
        generator.close()
    assert list(got.values()) == wanted
    assert method.name == "fp16" or kinds == {CompressedBatchCache}
    assert [type(c) for c in last[first]] == [type(c) for c in earlier]
    assert {c.offset for c in earlier} == {90}  # merging copies
    assert {c.offset for c in last[first]} == {70 + 8}


# -- conversations that are kept -------------------------------------------------------------------


def test_kept_conversations_are_found_by_what_they_begin_with(
    method: Any, model: nn.Module
) -> None:
    kept, whole = LRUPromptCache(4), PROMPT.tolist()
    stored = fed(method, model)
    kept.insert_cache("m", whole, stored)
    assert kept.nbytes == sum(c.nbytes for c in stored) > 0
    longer = [*whole, 5, 6]
    branch = [*whole[:80], 1, 2, 3]  # leaves the kept one within its window
    for asked, rest in ((whole, []), (longer, [5, 6]), (branch, [1, 2, 3])):
        found, left = kept.fetch_nearest_cache("m", asked)
        assert left == rest
        assert {c.offset for c in found} == {len(asked) - len(rest)}
        assert holds_codes(found)
        wanted = fed(method, model)
        trim_prompt_cache(wanted, 90 - found[0].offset)
        for token in (*rest, 7):
            assert mx.array_equal(step(model, found, [[token]]), step(model, wanted, [[token]]))
    assert {c.offset for c in stored} == {90}
    assert greedy(model, stored, 12) == greedy(model, fed(method, model), 12)
    kept.trim_to(n_sequences=0)
    assert kept.nbytes == 0
    assert kept.fetch_nearest_cache("m", whole) == (None, whole)


# -- long prompts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide() -> nn.Module:
    return tiny("llama", hidden_size=256, num_attention_heads=8, head_dim=64, num_hidden_layers=3)


def peaks(model: nn.Module, made: list[Any]) -> tuple[int, int]:
    """Bytes that half of a long prompt, and all of it, take at most, its caches included."""
    text, half = words(3072)[None], 0
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for start in range(0, 3072, 512):
        model(text[:, start : start + 512], cache=made)
        mx.eval([c.state for c in made])
        if start == 1024:
            half = mx.get_peak_memory() - before
    return half, mx.get_peak_memory() - before


def test_a_long_prompt_peaks_no_higher_and_grows_no_faster_than_with_plain_caches(
    method: Any, wide: nn.Module
) -> None:
    plain, ours = peaks(wide, native_caches(wide)), peaks(wide, make_cache(method, wide))
    assert ours[1] <= 1.25 * plain[1]
    if method.name != "fp16":
        assert ours[1] - ours[0] < plain[1] - plain[0]
