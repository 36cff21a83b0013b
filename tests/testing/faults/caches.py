"""Caches that lose, keep or mix up tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from attrs import evolve, field, frozen

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.step import Step
from tests.testing.faults.plant import (
    cache_fault,
    suite,
    transform_fault,
)
from tests.testing.sound import Flip, Sound


@cache_fault("test_a_window_over_everything_is_the_plain_cache")
class WindowIgnored(CompressedKVCache):
    def coded_at(self, seen: int) -> int:
        return max(0, seen - 8)


@cache_fault("test_how_tokens_arrive_does_not_matter")
class CodesChunksOnly(CompressedKVCache):
    def advance(self, keys: mx.array, values: mx.array) -> Step:
        self.single = keys.shape[2] == 1
        return super().advance(keys, values)

    def coded_at(self, seen: int) -> int:
        return 0 if self.single else super().coded_at(seen)


@cache_fault("test_what_is_exact_and_what_is_coded")
class OffsetOfKeptRows(CompressedKVCache):
    @property
    def offset(self) -> int:
        return self.exact.used if hasattr(self, "exact") else 0

    @offset.setter
    def offset(self, value: int) -> None:
        pass


@cache_fault("test_what_is_exact_and_what_is_coded")
class NothingIsCoded(CompressedKVCache):
    def coded_at(self, seen: int) -> int:
        return 0


def sinks_ignored(self: Any, bound: Any, budget: int = 64 << 20) -> CompressedKVCache:
    method = evolve(bound.method, sinks=0, window=bound.method.window + bound.method.sinks)
    return CompressedKVCache(method, bound.layer, bound.codec, budget=budget)


suite(
    "SinksIgnored",
    "test_what_is_exact_and_what_is_coded",
    __name__,
    method=Sound,
    new_cache=sinks_ignored,
)


@cache_fault("test_trim_is_never_having_seen")
class TrimsThePositionOnly(CompressedKVCache):
    def trim(self, n: int) -> int:
        n = min(n, self.offset)
        self.offset -= n
        return n


@cache_fault("test_trim_is_never_having_seen")
class KeepsTheFrontier(CompressedKVCache):
    frontier = 0

    def trim(self, n: int) -> int:
        self.frontier = max(self.frontier, self.store.tokens)
        return super().trim(n)

    def coded_at(self, seen: int) -> int:
        return max(0, super().coded_at(seen) - self.frontier)


@cache_fault("test_drafts_that_are_taken_back_leave_no_trace")
class CodesDraftsAtOnce(CompressedKVCache):
    def trim(self, n: int) -> int:
        self.complete()
        return super().trim(n)


@cache_fault("test_a_short_chunk_is_read_as_if_token_by_token")
class ReadsDraftsAtOnce(CompressedKVCache):
    def advance(self, keys: mx.array, values: mx.array) -> Any:
        self.complete()
        return self.append(keys, values)


@cache_fault("test_state_goes_on")
class StateWithoutMeans(CompressedKVCache):
    @property
    def state(self) -> Any:
        return super().state

    @classmethod
    def from_state(cls, state: Any) -> CompressedKVCache:
        made = CompressedKVCache.from_state(state)
        made.constants = {}
        return made


@cache_fault("test_state_goes_on")
class StateWithAnObject(CompressedKVCache):
    @property
    def state(self) -> Any:
        return (*super().state, self.method)

    @classmethod
    def from_state(cls, state: Any) -> CompressedKVCache:
        return CompressedKVCache.from_state(state[:-1])


@cache_fault("test_copies_are_independent")
class CopiesShareBuffers(CompressedKVCache):
    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made.exact = self.exact
        return made


@cache_fault("test_copies_are_independent")
class CopiesCopyTables(CompressedKVCache):
    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made.codec = self.method.bind(self.layer)
        return made


@cache_fault("test_nothing_sends_mlx_lm_astray")
class HasBits(CompressedKVCache):
    bits = 4


@cache_fault("test_nothing_sends_mlx_lm_astray")
class FalseWhenEmpty(CompressedKVCache):
    def __bool__(self) -> bool:
        return self.offset > 0


@cache_fault("test_nothing_sends_mlx_lm_astray")
class RotatingKVCache(CompressedKVCache):
    pass


@cache_fault("test_nothing_sends_mlx_lm_astray")
class MergesIntoPlainRows(CompressedKVCache):
    @staticmethod
    def merge(caches: Any) -> Any:
        from mlx_lm.models.cache import BatchKVCache, KVCache

        plain = [KVCache() for _ in caches]
        for held, made in zip(caches, plain, strict=True):
            made.update_and_fetch(*(mx.array(x) for x in held.keys_and_values()))
        return BatchKVCache.merge(plain)


@transform_fault("test_other_threads_may_use_it")
@frozen(eq=False)
class LazyTables(Flip):
    own: mx.array = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "own", super().table * 1.0)

    @property
    def table(self) -> mx.array:
        return self.own


@cache_fault("test_chunks_that_do_not_fit_are_refused")
class TakesAnyChunk(CompressedKVCache):
    def advance(self, keys: mx.array, values: mx.array) -> Step:
        rows = self.batch or keys.shape[0]
        return super().advance(keys[:rows].astype(self.layer.mx_dtype), values[:rows])


class Lasting(CompressedKVCache):
    """Copies and restored caches are as wrong as the first."""

    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made.__class__ = type(self)
        return made

    @classmethod
    def from_state(cls, state: Any) -> CompressedKVCache:
        made = CompressedKVCache.from_state(state)
        made.__class__ = cls
        return made


@cache_fault("test_any_history_is_that_of_a_list")
class MeansOutliveTheirTokens(Lasting):
    def complete(self) -> None:
        super().complete()
        if self.constants:
            self.constants = self.kept = getattr(self, "kept", self.constants)


@cache_fault("test_any_history_is_that_of_a_list")
class ForgetsOneInMany(Lasting):
    def trim(self, n: int) -> int:
        got = super().trim(n)
        if self.store.used > 40:
            self.store.tail = {k: mx.roll(a, 1, axis=2) for k, a in self.store.tail.items()}
        return got
