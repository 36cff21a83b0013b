"""Laws of a layer's cache: what it holds, and that it holds it however it came."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvcompress.cache.drafts import LONGEST
from kvcompress.errors import ConfigError
from kvcompress.testing.data import Tokens, tokens
from kvcompress.testing.law import (
    UNHEEDED,
    Draw,
    LawError,
    law,
    require,
    require_equal,
    require_same_decoding,
)
from kvcompress.testing.machine import CacheMachine
from kvcompress.testing.strategies import chunkings, seeds
from kvcompress.testing.subject import Bound, Subject, step_of
from kvcompress.testing.threads import in_thread

if TYPE_CHECKING:
    from kvcompress.cache.kvcache import CompressedKVCache

_SCALE = 0.125
_LONGEST = 160
FORBIDDEN = ("bits", "group_size", "to_quantized", "__len__")
"""Attributes by which mlx-lm takes a cache for another kind."""


def feed(cache: CompressedKVCache, came: Tokens, chunks: list[int]) -> Any:
    """Give a cache tokens chunk by chunk; the last two views."""
    start, views = 0, None
    for size in chunks:
        part = came.part(start, start + size)
        views = cache.update_and_fetch(part.keys, part.values)
        start += size
    return views


def require_same_cache(
    got: CompressedKVCache, wanted: CompressedKVCache, came: Tokens, what: str
) -> None:
    """Demand that two caches stand for the same, but for round-off in their codes."""
    require(
        (got.offset, got.tokens_coded) == (wanted.offset, wanted.tokens_coded),
        f"{what}: {got} against {wanted}",
    )
    pairs = zip(got.keys_and_values(), wanted.keys_and_values(), strict=True)
    for (a, b), x, part in zip(pairs, (came.keys, came.values), ("keys", "values"), strict=True):
        require_same_decoding(a, b, x, f"{part}: {what}")


class CacheLaws(Subject):
    """Laws of a cache that holds what the method codes."""

    def _draw_cache(self, draw: Draw, **options: Any) -> tuple[Bound, CompressedKVCache, int]:
        bound = self.draw_bound(draw, **{**self.draw_cache_options(draw), **options})
        return bound, self.new_cache(bound), draw(seeds(), "seed")

    @law(share=0.3)
    def test_a_window_over_everything_is_the_plain_cache(self, draw: Draw) -> None:
        """Bit for bit, in what is fetched and in attention: the yardstick of all the rest."""
        from mlx_lm.models.cache import KVCache

        bound, ours, seed = self._draw_cache(draw, window=_LONGEST)
        plain, came, start = KVCache(), tokens(bound.layer, 60, seed=seed), 0
        for size in draw(chunkings(60), "chunks"):
            part = came.part(start, start + size)
            mask = ours.make_mask(size)
            keys, values = ours.update_and_fetch(part.keys, part.values)
            out = step_of(keys).attend(part.queries, scale=_SCALE, mask=mask)
            wanted_keys, wanted_values = plain.update_and_fetch(part.keys, part.values)
            require_equal(keys, wanted_keys, "keys fetched")
            require_equal(values, wanted_values, "values fetched")
            wanted = mx.fast.scaled_dot_product_attention(
                part.queries, wanted_keys, wanted_values, scale=_SCALE, mask=mask
            )
            require_equal(out, wanted, f"attention of {size} tokens after {start}")
            start += size

    @law(share=0.3)
    def test_how_tokens_arrive_does_not_matter(self, draw: Draw) -> None:
        """One chunk, many, or token by token: the same codes of the same tokens."""
        bound, many, seed = self._draw_cache(draw)
        one, came = self.new_cache(bound), tokens(bound.layer, _LONGEST, seed=seed)
        feed(one, came, [_LONGEST])
        feed(many, came, draw(chunkings(_LONGEST), "chunks"))
        require_same_cache(many, one, came, "in chunks and at once")

    @law()
    def test_what_is_exact_and_what_is_coded(self, draw: Draw) -> None:
        """The offset counts tokens; sinks and window are exact; whole blocks beyond are coded."""
        bound, cache, seed = self._draw_cache(draw)
        method, count = bound.method, draw(st.integers(1, _LONGEST), "tokens")
        came = tokens(bound.layer, count, seed=seed)
        start = 0
        for size in draw(chunkings(count), "chunks"):
            feed(cache, came.part(start, start + size), [size])
            start += size
            require(cache.offset == start, f"offset is {cache.offset} after {start} tokens")
        beyond = max(0, count - method.sinks - max(method.window, 0))
        block = method.block if method.window > 0 else 1
        few = beyond < max(1, bound.codec.warmup)
        wanted = 0 if few else beyond - beyond % block
        require(
            cache.tokens_coded == wanted,
            f"{cache.tokens_coded} of {count} tokens are coded, to be {wanted} with "
            f"window={method.window}, sinks={method.sinks}, block={method.block}",
        )
        for got, x, part in zip(
            cache.keys_and_values(), (came.keys, came.values), ("keys", "values"), strict=True
        ):
            sinks, recent = min(method.sinks, count), method.sinks + wanted
            require_equal(got[:, :, :sinks], x[:, :, :sinks], f"{part} of the sinks")
            require_equal(got[:, :, recent:], x[:, :, recent:], f"{part} of the window")

    @law(share=0.3)
    def test_batch_rows_do_not_meet(self, draw: Draw) -> None:
        """Rows of one array are as if each had run alone."""
        bound, together, seed = self._draw_cache(draw)
        came = tokens(bound.layer, 120, batch=2, seed=seed)
        chunks = draw(chunkings(120), "chunks")
        feed(together, came, chunks)
        for row in range(2):
            alone, own = self.new_cache(bound), came.rows(row, row + 1)
            feed(alone, own, chunks)
            for got, wanted, x in zip(
                together.keys_and_values(),
                alone.keys_and_values(),
                (own.keys, own.values),
                strict=True,
            ):
                require_same_decoding(got[row : row + 1], wanted, x, f"row {row} and alone")

    @law(share=0.3)
    def test_trim_is_never_having_seen(self, draw: Draw) -> None:
        """Trimming must move the frontier with the position, on either side of it."""
        bound, cache, seed = self._draw_cache(draw)
        came = tokens(bound.layer, _LONGEST, seed=seed)
        feed(cache, came, draw(chunkings(_LONGEST), "chunks"))
        before = [mx.array(x) for x in cache.keys_and_values()]
        forgotten = draw(st.integers(0, _LONGEST), "forgotten")
        left = _LONGEST - forgotten
        got = cache.trim(forgotten)
        require(
            got == forgotten and cache.offset == left and cache.empty() == (left == 0),
            f"trim({forgotten}) of {_LONGEST} gave {got} and leaves {cache}",
        )
        if left:
            for now, then in zip(cache.keys_and_values(), before, strict=True):
                require_equal(now, then[:, :, :left], "what is left after trim")
        kept = came.part(0, left)
        new = tokens(bound.layer, 2 * _LONGEST, seed=seed + 1, start=left)
        whole = kept.then(new)
        feed(cache, new, [5, len(new) - 5])
        fresh = self.new_cache(bound)
        feed(fresh, whole, [len(whole)])
        require(
            cache.offset == fresh.offset and cache.tokens_coded == fresh.tokens_coded,
            f"after trim: {cache}, never having seen: {fresh}",
        )
        warm = bound.method.sinks + bound.codec.warmup
        if 0 < left < warm and bound.codec.warmup:
            return  # the mean was taken from tokens that were trimmed since
        require_same_cache(cache, fresh, whole, "after trim and never having seen")

    @law(share=0.3)
    def test_drafts_that_are_taken_back_leave_no_trace(self, draw: Draw) -> None:
        """They have made no block old, and had no say in how tokens are coded."""
        bound, cache, seed = self._draw_cache(draw)
        early, drafts = draw(st.integers(0, 150), "before"), draw(st.integers(2, LONGEST), "drafts")
        back = draw(st.integers(0, drafts), "taken back")
        came = tokens(bound.layer, early + drafts, seed=seed)
        kept = early + drafts - back
        fresh = self.new_cache(bound)
        for held, stop in ((cache, early + drafts), (fresh, kept)):
            for part in (came.part(0, early), came.part(early, stop)):
                if len(part):
                    keys, _ = held.update_and_fetch(part.keys, part.values)
                    mx.eval(step_of(keys).attend(part.queries, scale=_SCALE, mask="causal"))
        cache.trim(back)
        if kept:
            require_same_cache(cache, fresh, came.part(0, kept), "taken back and never drafted")

    @law(share=0.3)
    def test_state_goes_on(self, draw: Draw) -> None:
        """A state holds all that decoding needs, and only what mlx-lm can save."""
        bound, cache, seed = self._draw_cache(draw)
        count = draw(st.integers(1, _LONGEST), "tokens")
        came = tokens(bound.layer, count + 40, seed=seed)
        feed(cache, came, [count])
        state = cache.state
        strange = [type(item).__name__ for item in _leaves(state) if not _savable(item)]
        require(not strange, f"the state holds {strange}")
        before = [mx.array(x) for x in cache.keys_and_values()]
        try:
            other = type(cache).from_state(state)
            restored = [mx.array(x) for x in other.keys_and_values()]
            feed(other, came.part(count, count + 40), [1, 39])
        except Exception as error:
            raise LawError(f"a restored cache does not go on: {error!r}") from error
        for now, then in zip(restored, before, strict=True):
            require_equal(now, then, "restored from its state")
        feed(cache, came.part(count, count + 40), [1, 39])
        require_same_cache(other, cache, came, "restored from its state")

    @law(share=0.3)
    def test_copies_are_independent(self, draw: Draw) -> None:
        """Neither copy may write into the other's buffers; the tables are not copied."""
        bound, cache, seed = self._draw_cache(draw)
        count = draw(st.integers(1, _LONGEST), "tokens")
        came = tokens(bound.layer, count + 40, seed=seed)
        feed(cache, came, [count])
        before = [mx.array(x) for x in cache.keys_and_values()]
        mx.eval(before)
        other = copy.deepcopy(cache)
        require(other.codec is bound.codec, "deepcopy copies the codec and its tables")
        mine, theirs = (tokens(bound.layer, 40, seed=s, start=count) for s in (seed, seed + 1))
        feed(other, theirs, [3, 37])
        for now, then in zip(cache.keys_and_values(), before, strict=True):
            require_equal(now, then, "the original after its copy went on")
        feed(cache, mine, [40])
        for held, later in ((cache, mine), (other, theirs)):
            wanted = self.new_cache(bound)
            whole = came.part(0, count).then(later)
            feed(wanted, whole, [len(whole)])
            require_same_cache(held, wanted, whole, "one of two copies and a cache of its own")
        require(
            not cache.empty() and copy.deepcopy(self.new_cache(bound)).empty(),
            "a copy of an empty cache is not empty",
        )

    @law(share=0.2)
    def test_nothing_sends_mlx_lm_astray(self, draw: Draw) -> None:
        """mlx-lm goes by attributes and class names; an empty cache must be true."""
        from mlx_lm.models import cache as theirs

        bound, cache, seed = self._draw_cache(draw)
        feed(cache, tokens(bound.layer, _LONGEST, seed=seed), [_LONGEST])
        for held in (cache, self.new_cache(bound)):
            found = [name for name in FORBIDDEN if hasattr(held, name)]
            require(not found, f"the cache has {', '.join(found)}")
            require(bool(held), "the cache is false")
            require(held.is_trimmable(), "the cache cannot be trimmed")
        merged = cache.merge([cache, cache])
        require(
            merged.nbytes <= 2 * cache.nbytes and type(merged).__module__.startswith("kvcompress"),
            f"merge gives a {type(merged).__name__} of {merged.nbytes} bytes for two of "
            f"{cache.nbytes}",
        )
        kind = type(cache)
        require(
            not issubclass(kind, theirs.KVCache) and not hasattr(theirs, kind.__name__),
            f"{kind.__name__} is, or is called as, a cache of mlx-lm",
        )

    @law(share=0.2)
    def test_other_threads_may_use_it(self, draw: Draw) -> None:
        """Tables that are still lazy cannot be computed by a server's worker."""
        with mx.stream(mx.new_stream(mx.default_device())):
            bound = self.standard(window=16, sinks=1, block=16)
            cache = self.new_cache(bound)
        seed = draw(seeds(), "seed")
        came = tokens(bound.layer, 120, seed=seed)
        more = tokens(bound.layer, 20, seed=seed + 1, start=120)

        def run(part: Tokens) -> None:
            keys, _ = cache.update_and_fetch(part.keys, part.values)
            mx.eval(step_of(keys).attend(part.queries, scale=_SCALE, mask="causal"))

        def save() -> None:
            mx.eval([item for item in _leaves(cache.state) if isinstance(item, mx.array)])

        for who, work in (
            ("a worker", lambda: run(came)),
            ("one that saves", save),
            ("another", lambda: run(more)),
        ):
            error = in_thread(work)
            require(error is None, f"in {who}: {error!r}")
        wanted = self.new_cache(bound)
        for part in (came, more):
            keys, _ = wanted.update_and_fetch(part.keys, part.values)
            step_of(keys).attend(part.queries, scale=_SCALE, mask="causal")
        require_same_cache(cache, wanted, came.then(more), "fed by two threads")

    @law(share=0.2)
    def test_chunks_that_do_not_fit_are_refused(self, draw: Draw) -> None:
        """A chunk of another shape or dtype names itself, and leaves the cache as it was."""
        bound, cache, seed = self._draw_cache(draw)
        layer = bound.layer
        came = tokens(layer, 8, seed=seed)
        feed(cache, came, [8])
        other = mx.float16 if layer.dtype != "float16" else mx.float32
        wrong = {
            "heads": (mx.concatenate([came.keys] * 2, axis=1), came.values),
            "channels": (came.keys[..., :-1], came.values),
            "dtype": (came.keys.astype(other), came.values.astype(other)),
            "tokens": (came.keys, came.values[:, :, :-1]),
            "batch": (mx.concatenate([came.keys] * 2), mx.concatenate([came.values] * 2)),
        }
        for what, (keys, values) in wrong.items():
            try:
                cache.update_and_fetch(keys, values)
            except ConfigError as error:
                require(bound.method.name in str(error), f"{what}: nameless: {error}")
            except Exception as error:
                raise LawError(f"a chunk of other {what} fails late: {error!r}") from error
            else:
                raise LawError(f"a chunk of other {what} is taken")
            require(cache.offset == 8, f"{what}: a refused chunk moved the offset")

    def test_any_history_is_that_of_a_list(self) -> None:
        """Any order of operations against a plain list of tokens."""
        self.needs_codec()
        profile = settings()
        factory: Any = lambda: CacheMachine(self)  # noqa: E731 (typed as a class there)
        run_state_machine_as_test(
            factory,
            settings=settings(
                profile,
                max_examples=max(1, round(profile.max_examples * self.effort() / 4)),
                stateful_step_count=16,
                deadline=None,
                suppress_health_check=UNHEEDED,
            ),
        )


def _leaves(state: Any) -> list[Any]:
    if isinstance(state, (list, tuple)):
        return [leaf for item in state for leaf in _leaves(item)]
    return [state]


def _savable(item: Any) -> bool:
    return item is None or isinstance(item, (mx.array, str, bool, int, float))
