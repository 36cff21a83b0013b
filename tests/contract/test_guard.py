"""The guard over mlx-lm's contract, itself tested: each planted change is told in plain words."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm import server
from mlx_lm.models import base
from mlx_lm.models import cache as caches

from tests.contract import test_mlx_lm as guards

Plant = Callable[[pytest.MonkeyPatch], None]


def gained(owner: Any, name: str, value: Any = lambda self: None) -> Plant:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


def lost(owner: Any, name: str) -> Plant:
    return lambda patch: patch.delattr(owner, name)


def shipped(source: str) -> Plant:
    """A model file more."""
    files = guards.model_files() | {"newcomer": ast.parse(source)}
    return lambda patch: patch.setattr(guards, "model_files", lambda: files)


def attention_with_more(queries, keys, values, cache, scale, mask, sinks=None, bias=None):  # type: ignore[no-untyped-def]
    """mlx-lm's attention call as it might become."""


PLAIN, BATCH = (
    guards.test_a_plain_cache_is_what_was_read,
    guards.test_a_batch_cache_is_what_was_read,
)
PLANTED: dict[str, tuple[Plant, Callable[[], None], str]] = {
    "a cache gains a method": (
        gained(caches.KVCache, "rewind"),
        PLAIN,
        "KVCache has a new member 'rewind': .* have CompressedKVCache offer it",
    ),
    "a cache loses a method": (
        lost(caches.KVCache, "trim"),
        PLAIN,
        "KVCache has no member 'trim' any more: see what mlx-lm uses in its place",
    ),
    "a cache's method takes more": (
        gained(caches.KVCache, "trim", lambda self, n, keep: n),
        PLAIN,
        r"KVCache\.trim takes \(n, keep\), where \(n\) was read: CompressedKVCache",
    ),
    "all caches gain a property": (
        gained(caches._BaseCache, "layout", property(lambda self: "dense")),
        PLAIN,
        "KVCache has a new member 'layout'",
    ),
    "a batch gains a method": (
        gained(caches.BatchKVCache, "compact"),
        BATCH,
        "BatchKVCache has a new member 'compact': .* have CompressedBatchCache offer it",
    ),
    "a batch loses a method": (
        lost(caches.BatchKVCache, "extract"),
        BATCH,
        "BatchKVCache has no member 'extract' any more",
    ),
    "a mask takes more": (
        gained(caches, "create_attention_mask", lambda N, offset, window_size, sink: 0),
        guards.test_our_caches_take_what_was_read,
        r"takes \['sink'\] too: so should our make_mask",
    ),
    "a function takes less": (
        gained(base, "create_causal_mask", lambda N, offset=0, window_size=None: 0),
        guards.test_every_name_that_we_take_from_mlx_lm_is_there_and_takes_our_arguments,
        r"batch\.py:\d+ calls create_causal_mask: .*argument 'left_padding'",
    ),
    "a function goes": (
        lost(caches, "make_prompt_cache"),
        guards.test_every_name_that_we_take_from_mlx_lm_is_there_and_takes_our_arguments,
        r"native\.py takes make_prompt_cache from mlx_lm\.models\.cache, which has it no more",
    ),
    "attention takes more": (
        gained(base, guards.CALL, attention_with_more),
        guards.test_the_attention_call_takes_what_dispatch_understands,
        "attention takes other arguments: teach kvcompress.cache.dispatch",
    ),
    "a model hands attention more": (
        shipped(f"from .base import {guards.CALL}\n{guards.CALL}(q, k, v, cache=c, bias=b)"),
        guards.test_models_import_the_attention_call_by_name_and_pass_it_known_arguments,
        "newcomer passes .*bias",
    ),
    "a model computes attention itself": (
        shipped("keys, values = cache.update_and_fetch(keys, values)"),
        guards.test_the_files_with_an_attention_of_their_own_are_known,
        r"\['newcomer'\]: queries are hidden there",
    ),
    "a model takes a cache's arrays": (
        shipped("keys = cache.keys"),
        guards.test_the_files_that_take_a_caches_arrays_are_known,
        r"\['newcomer'\]: most do so in pipelines only",
    ),
    "a model rotates by hand": (
        shipped("keys = keys * mx.cos(phase)"),
        guards.test_every_rotation_goes_through_mx_fast_rope_looked_up_at_the_call,
        r"\{'newcomer'\}: may rotate by hand",
    ),
    "a cache is asked for something new": (
        shipped('if hasattr(cache, "ring"): pass'),
        guards.test_mlx_lm_asks_caches_for_no_attribute_that_was_not_read,
        r"mlx-lm asks caches for \['ring'\]",
    ),
    "a kind of cache comes": (
        gained(caches, "RingKVCache", type("RingKVCache", (caches.KVCache,), {})),
        guards.test_the_kinds_of_cache_are_known,
        r"new kinds of cache, \['RingKVCache'\]",
    ),
    "a kind of cache goes": (
        lost(caches, "ChunkedKVCache"),
        guards.test_the_kinds_of_cache_are_known,
        r"mlx-lm has no \['ChunkedKVCache'\] any more",
    ),
    "the server loses a method": (
        lost(server.ModelProvider, "load_default"),
        guards.test_the_server_has_what_ours_extends,
        "mlx_lm.server.ModelProvider lacks 'load_default'",
    ),
    "the server's method takes more": (
        gained(server.ResponseGenerator, "_serve_single", lambda self, request, stream, user: None),
        guards.test_the_server_has_what_ours_extends,
        r"_serve_single takes \(request, stream, user\), where \(request, stream\) was read",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_change_is_told_in_plain_words(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, guard, said = PLANTED[what]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=said):
        guard()
