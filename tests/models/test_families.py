"""Every family that mlx-lm ships is compressed, or refused before it runs; nothing between."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import _merge_caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    trim_prompt_cache,
)

from benchmarks.families import COMMAND, row
from kvcompress import attach, get_method, load_cache, make_cache, save_cache
from kvcompress.cache import CompressedKVCache
from kvcompress.cache.native import native_caches
from kvcompress.cache.nested import leaves
from kvcompress.errors import UnsupportedModel
from kvcompress.method import Method
from tests.toy_model import Near
from tests.zoo import FAILING, FAMILIES, FIELDS, LATER, logits, shipped, tiny

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "families.json"
STORED = {r["family"]: r for r in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}

CHUNKS = (7, 7, 6, 1, 1, 1, 5, 1)
TOKENS = mx.array([[(7 * i * i + 3 * i) % 61 + 2 for i in range(60)]])
SPARSE = {"window": 3, "sinks": 1, "block": 16}  # of 29 tokens 16 are coded
KEEPS_ALL = Near(window=60)
NEAR = Near(**SPARSE)
FINE = get_method("turboquant", bits=8, centre="none", **SPARSE)
COARSE = get_method("turboquant", bits=1, centre="none", **SPARSE)

# What must compress, in every layer that attends to all tokens.
MUST = [
    "llama",
    "llama4",
    "llama4_text",
    "qwen2",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "mixtral",
    "ministral3",
    "mistral3",
    "pixtral",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n",
    "gemma4",
    "gemma4_text",
    "phi",
    "phi3",
    "phimoe",
    "gpt_oss",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "olmo2",
    "olmo3",
    "smollm3",
    "starcoder2",
    "cohere",
    "cohere2",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2-vl",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "bailing_moe_linear",
    "falcon_h1",
    "baichuan_m1",
]

# Compressed families that keep several caches of a layer in one entry of their list.
BUNDLED = ["baichuan_m1", "falcon_h1", "minimax_m3_vl"]

# Compressed families that mlx-lm itself cannot run in a batch, by what the error says.
UNBATCHED = {
    "gpt_bigcode": "Only length-1 arrays",
    "llama4": "does not yet support batching",
}

# Families whose rows mlx-lm itself computes otherwise in a batch than alone.
UNLIKE_ALONE = {"afm7", "gemma2", "phi3small"}

# Families that mlx-lm 0.32.0 masks wrongly in a batch of its own caches; of ours none needs a mask.
MISMASKED = {"minicpm3", "phixtral"} if version("mlx-lm") == "0.32.0" else set()


def deviation(got: mx.array, expected: mx.array) -> float:
    """Length of the difference over that of what is expected, where it is finite.

    The whole counts, since a rounded router may send single tokens to other experts.
    """
    kept = mx.isfinite(expected)
    assert mx.array_equal(kept, mx.isfinite(got))
    expected = mx.where(kept, expected, 0)
    size = float(mx.linalg.norm(expected))
    assert size > 0.1, "logits of nothing prove nothing"
    return float(mx.linalg.norm(mx.where(kept, got, 0) - expected)) / size


class Met:
    """A family's model, and what it computes with its own caches."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.model = tiny(family)

    def run(self, caches: list[Any], chunks: Sequence[int] = CHUNKS, start: int = 0) -> mx.array:
        """Logits of all chunks, each computed before the next."""
        out = []
        for count in chunks:
            out.append(logits(self.model, TOKENS[:, start : start + count], caches))
            mx.eval(out[-1], [cache.state for cache in caches])
            start += count
        return mx.concatenate(out, axis=1)

    def coded(self, method: Method) -> mx.array:
        """Logits through a method's caches, of which every compressed one holds codes."""
        caches = make_cache(method, self.model)
        out = self.run(caches)
        assert {cache.tokens_coded for cache in ours(caches)} == {16}
        return out

    def native(self) -> list[Any]:
        return native_caches(self.model)

    def near(self) -> list[Any]:
        return make_cache(NEAR, self.model)

    @cached_property
    def expected(self) -> mx.array:
        return self.run(self.native())


def ours(caches: list[Any]) -> list[CompressedKVCache]:
    return [cache for cache in leaves(caches) if isinstance(cache, CompressedKVCache)]


def with_fate(fate: str) -> list[str]:
    return [family for family in FAMILIES if STORED.get(family, {}).get("fate") == fate]


@pytest.fixture(scope="module", params=with_fate("compressed"))
def compressed(request: pytest.FixtureRequest) -> Met:
    return Met(request.param)


@pytest.fixture(scope="module", params=with_fate("refused"))
def refused(request: pytest.FixtureRequest) -> Met:
    return Met(request.param)


def test_every_family_is_here_or_said_to_fail() -> None:
    new, gone = shipped() - set(FIELDS), set(FIELDS) - shipped()
    assert not new, f"mlx-lm has new families, {sorted(new)}: say in tests/zoo how to build them"
    assert not gone, f"mlx-lm no longer has {sorted(gone)}: take them out of tests/zoo"
    assert set(FAMILIES) == set(FIELDS) - set(FAILING)
    assert len(FAMILIES) > 90
    named = {*MUST, *UNBATCHED, *UNLIKE_ALONE} - (LATER.keys() - FIELDS.keys())
    assert named <= set(with_fate("compressed"))


@pytest.mark.parametrize("family", sorted(FIELDS))
def test_the_results_are_what_is_seen(family: str) -> None:
    assert STORED.get(family) == row(family), f"run {COMMAND}"


def test_the_results_are_of_every_family_and_by_the_command() -> None:
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert [r["family"] for r in data["rows"]] == sorted({*FIELDS, *LATER}, key=str.lower)
    assert data["command"] == COMMAND


@pytest.mark.parametrize("family", MUST)
def test_the_families_in_use_are_compressed_wherever_they_attend_to_everything(family: str) -> None:
    kinds = [{type(c) for c in leaves([entry])} for entry in native_caches(tiny(family))]
    assert set().union(*kinds) <= {KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache}
    full = [i for i, kind in enumerate(kinds) if KVCache in kind]
    assert full
    assert STORED[family]["compressed"] == full


def test_logits_are_the_models_to_the_bit_while_nothing_is_coded(compressed: Met) -> None:
    caches, own = make_cache(KEEPS_ALL, compressed.model), compressed.native()
    chosen = STORED[compressed.family]["compressed"]
    assert [i for i, entry in enumerate(caches) if ours([entry])] == chosen
    bundled = [type(entry) is CacheList for entry in caches]
    assert bundled == [type(entry) is CacheList for entry in own]
    assert any(bundled) == (compressed.family in BUNDLED)
    for now, was in zip(leaves(caches), leaves(own), strict=True):
        assert (type(now), type(was)) == (CompressedKVCache, KVCache) or type(now) is type(was)
    assert mx.array_equal(compressed.run(caches), compressed.expected)


def test_codes_that_lose_nearly_nothing_leave_the_logits(compressed: Met) -> None:
    assert deviation(compressed.coded(NEAR), compressed.expected) < 1e-4


def test_eight_bits_change_the_logits_little_and_one_bit_much(compressed: Met) -> None:
    fine = deviation(compressed.coded(FINE), compressed.expected)
    coarse = deviation(compressed.coded(COARSE), compressed.expected)
    assert 1e-6 < fine < 0.03
    assert coarse > 4 * fine


def test_trimming_goes_back_as_the_models_own_caches_do(compressed: Met) -> None:
    caches, own = compressed.near(), compressed.native()
    for each in (caches, own):
        compressed.run(each)
    assert can_trim_prompt_cache(caches) == can_trim_prompt_cache(own)
    if not can_trim_prompt_cache(own):
        for cache in ours(caches):
            assert cache.trim(6) == 6
            assert cache.offset == 23
        return
    assert trim_prompt_cache(caches, 6) == trim_prompt_cache(own, 6) == 6
    got, expected = (compressed.run(each, (5, 1, 1), 30) for each in (caches, own))
    assert deviation(got, expected) < 1e-4


def two(met: Met, make: Callable[[], list[Any]]) -> list[list[Any]]:
    """Caches of two conversations, of 21 and 29 tokens."""
    rows = [make(), make()]
    met.run(rows[0], (13, 8))
    met.run(rows[1], CHUNKS, 20)
    return rows


def together(met: Met, make: Callable[[], list[Any]]) -> mx.array:
    """Logits of two conversations that go on in a batch."""
    merged, out = _merge_caches(two(met, make)), []
    for start, count in ((0, 3), (3, 1)):
        ends = (21 + start, 49 + start)
        tokens = mx.concatenate([TOKENS[:, end : end + count] for end in ends])
        out.append(logits(met.model, tokens, merged))
        mx.eval(out[-1])
    return mx.concatenate(out, axis=1)


def apart(met: Met, make: Callable[[], list[Any]]) -> mx.array:
    """The same, each by itself."""
    ends = zip(two(met, make), (21, 49), strict=True)
    return mx.concatenate([met.run(row, (3, 1), end) for row, end in ends])


def test_a_batch_of_two_computes_what_a_batch_of_the_models_own_does(compressed: Met) -> None:
    if compressed.family in UNBATCHED:
        for make in (compressed.native, compressed.near):
            with pytest.raises(ValueError, match=UNBATCHED[compressed.family]):
                together(compressed, make)
        return
    expected = together(compressed, compressed.native)
    alone = apart(compressed, compressed.native)
    if compressed.family in MISMASKED:
        assert deviation(expected, alone) > 1e-3
        expected = alone
    assert deviation(together(compressed, compressed.near), expected) < 1e-4
    alike = deviation(expected, alone) < 1e-4
    assert alike == (compressed.family not in UNLIKE_ALONE)


@pytest.mark.parametrize("family", BUNDLED)
def test_bundled_caches_go_on_from_a_file_as_if_never_stopped(family: str, tmp_path: Path) -> None:
    met = Met(family)
    caches = make_cache(FINE, met.model)
    met.run(caches)
    save_cache(tmp_path / "a.safetensors", caches)
    loaded = load_cache(tmp_path / "a.safetensors", met.model)
    assert [type(entry) for entry in loaded] == [CacheList] * len(caches)
    assert [c.tokens_coded for c in ours(loaded)] == [c.tokens_coded for c in ours(caches)]
    got, expected = (met.run(each, (3, 1, 1), 29) for each in (loaded, caches))
    assert mx.array_equal(got, expected)


def test_a_family_with_nothing_to_compress_is_refused_with_reasons(refused: Met) -> None:
    why = STORED[refused.family]["why"]
    for ask in (lambda: make_cache(NEAR, refused.model), lambda: attach(refused.model, NEAR)):
        with pytest.raises(UnsupportedModel, match="can be compressed") as refusal:
            ask()
        for reason in (part.partition(": ")[2] for part in why.split("; ")):
            assert reason
            assert reason in str(refusal.value)
    assert "make_cache" not in vars(refused.model)


def test_a_refused_family_runs_as_ever_and_with_the_method_that_leaves_caches_alone(
    refused: Met,
) -> None:
    with pytest.raises(UnsupportedModel):
        make_cache(NEAR, refused.model)
    caches = make_cache(get_method("fp16"), refused.model)
    assert [type(cache) for cache in caches] == [type(cache) for cache in refused.native()]
    out = refused.run(caches)
    assert mx.array_equal(out, refused.expected)
    assert float(mx.abs(out).max()) > 0


@pytest.mark.parametrize("family", sorted(FAILING))
def test_a_family_that_is_said_to_fail_does_so_with_its_own_caches(family: str) -> None:
    said, why = FAILING[family]
    if "Metal" in why and mx.metal.is_available():
        pytest.skip("there is a Metal back-end")
    model = tiny(family)

    def run(model: nn.Module) -> None:
        mx.eval(logits(model, TOKENS[:, :7], native_caches(model)))

    with pytest.raises((RuntimeError, ValueError), match=said):
        run(model)
    with pytest.raises(UnsupportedModel, match=said):
        make_cache(NEAR, model)
