"""A state machine that plays any history against a plain list of tokens."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcompress.cache.drafts import LONGEST
from kvcompress.testing.data import Tokens, tokens
from kvcompress.testing.law import (
    Draw,
    numbers,
    require,
    require_close,
    require_equal,
    require_same_decoding,
)
from kvcompress.testing.oracles import attention
from kvcompress.testing.strategies import layers
from kvcompress.testing.subject import Subject, step_of

if TYPE_CHECKING:
    from kvcompress.cache.kvcache import CompressedKVCache

_SCALE = 0.125


class History:
    """What a cache should stand for: the tokens, how many are coded, and with which means."""

    def __init__(self, bound: Any) -> None:
        self.bound = bound
        self.came: Tokens | None = None
        self.coded = 0
        self.constants: dict[str, mx.array] = {}

    def __len__(self) -> int:
        return 0 if self.came is None else len(self.came)

    def copy(self) -> History:
        """The same history, to go on apart."""
        other = History(self.bound)
        other.came, other.coded, other.constants = self.came, self.coded, self.constants
        return other

    def append(self, new: Tokens) -> None:
        """Add tokens; whole blocks beyond sinks and window become codes."""
        self.came = new if self.came is None else self.came.then(new)
        method = self.bound.method
        beyond = len(self) - method.sinks - max(method.window, 0)
        if beyond < max(1, self.bound.codec.warmup):
            return
        target = beyond - beyond % (method.block if method.window > 0 else 1)
        if not self.coded and target:
            first = self.came.part(method.sinks, method.sinks + max(1, self.bound.codec.warmup))
            self.constants = self.bound.codec.begin(first.keys, first.values, first.positions)
        self.coded = max(self.coded, target)

    def trim(self, count: int) -> None:
        """Forget the last tokens; what was coded before them stays coded."""
        left = len(self) - count
        self.came = self.came.part(0, left) if self.came is not None and left else None
        self.coded = max(0, min(self.coded, left - self.bound.method.sinks))

    def dense(self, coded: int, got: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
        """All tokens, of which ``coded`` after the sinks are read as codes.

        Where a codec has two assignments, each token's is the one that is nearer to ``got``.
        """
        if self.came is None:
            raise RuntimeError("an empty history stands for nothing")
        if not coded:
            return self.came.keys, self.came.values
        first = self.bound.method.sinks
        codec, middle = self.bound.codec, self.came.part(first, first + coded)
        runs = []
        for care in (True, False) if codec.chooses else (True,):
            marks = mx.full(middle.keys.shape[::2], care) if codec.chooses else None
            codes = codec.encode(
                middle.keys, middle.values, middle.positions, self.constants, marks
            )
            runs.append(codec.decode(codes, middle.positions))
        out = []
        for x, a, *decoded in zip((self.came.keys, self.came.values), got, *runs, strict=True):
            cut = a[:, :, first : first + coded]
            best, *others = decoded
            for other in others:
                off = [
                    mx.abs((y - cut).astype(mx.float32)).sum((1, 3), keepdims=True)
                    for y in (best, other)
                ]
                best = mx.where(off[0] <= off[1], best, other)
            parts = [x[:, :, :first], best, x[:, :, first + coded :]]
            out.append(mx.concatenate(parts, axis=2))
        return out[0], out[1]


class CacheMachine(RuleBasedStateMachine):
    """Appends, attends, trims, copies, saves states and merges, in any order.

    Args:
        subject: What makes methods and caches.
    """

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A method, a layer and a cache, empty or after a prompt."""
        draw: Draw = data.draw
        options = self._subject.draw_cache_options(draw)
        small = layers(head_dims=(64, 80), dtypes=("float32", "float16"))
        self.bound = self._subject.draw_bound(draw, small, **options)
        self.cache: CompressedKVCache = self._subject.new_cache(self.bound)
        self.history = History(self.bound)
        self.others: list[tuple[CompressedKVCache, History]] = []
        self.fed = 0
        if count := draw(st.sampled_from((0, 60, 150, 150)), "prompt"):
            self.append(count)

    def _new(self, count: int) -> Tokens:
        self.fed += 1
        return tokens(self.bound.layer, count, seed=self.fed, start=len(self.history))

    @rule(count=st.sampled_from((1, 2, 7, 33, 90)))
    def append(self, count: int) -> None:
        """A chunk; what its step reads is what stood before, and the chunk itself."""
        before, new = self.history.coded, self._new(count)
        cut = 1 < count <= LONGEST and self.cache.coded_after(count - 1) > before
        self.history.append(new)
        keys, values = self.cache.update_and_fetch(new.keys, new.values)
        self._compare((keys, values), before, "what a step reads")
        wanted = attention(
            numbers(new.queries), numbers(keys), numbers(values), scale=_SCALE, mask="causal"
        )
        # A short chunk in which a block grows old is read as if token by token.
        if self._subject.reads_decoded_keys(self.bound) and not cut:
            mask = "causal" if count > 1 else None
            out = step_of(keys).attend(new.queries, scale=_SCALE, mask=mask)
            size = 5e-2 if self.bound.layer.dtype == "float16" else 2e-3
            require_close(out, wanted, size * (1 + float(np.abs(wanted).max())), "attention")

    @precondition(lambda self: len(self.history) > 0)
    @rule(share=st.sampled_from((0.0, 0.05, 0.3, 0.8, 1.0)))
    def trim(self, share: float) -> None:
        """Some of the last tokens, none, or all."""
        count = round(share * len(self.history))
        require(self.cache.trim(count) == count, f"trim({count}) of {len(self.history)}")
        self.history.trim(count)

    @precondition(lambda self: len(self.history) > 0)
    @rule(count=st.sampled_from((5, 90)))
    def begin_again(self, count: int) -> None:
        """Forget everything; what comes next is coded by what it is itself."""
        self.trim(1.0)
        self.append(count)

    @rule()
    def split(self) -> None:
        """Go on with a copy, and keep the original."""
        if len(self.others) < 2:
            self.others.append((self.cache, self.history))
            self.cache, self.history = copy.deepcopy(self.cache), self.history.copy()

    @precondition(lambda self: len(self.history) > 0)
    @rule()
    def restore(self) -> None:
        """Go on from the state alone."""
        self.cache = type(self.cache).from_state(self.cache.state)

    @precondition(lambda self: len(self.history) > 0)
    @rule()
    def batch(self) -> None:
        """Into a batch and out again."""
        self.cache = type(self.cache).merge([self.cache, self.cache]).extract(1)

    @precondition(lambda self: bool(self.others))
    @rule()
    def switch(self) -> None:
        """Go on with a copy that was left behind."""
        self.others.append((self.cache, self.history))
        self.cache, self.history = self.others.pop(0)

    @invariant()
    def stands_for_its_history(self) -> None:
        """Every cache, at any time."""
        for cache, history in ((self.cache, self.history), *self.others):
            require(
                (cache.offset, cache.size(), cache.empty(), cache.tokens_coded)
                == (len(history), len(history), len(history) == 0, history.coded),
                f"{cache} against {len(history)} tokens, {history.coded} coded",
            )
            if len(history):
                self._compare(cache.keys_and_values(), history.coded, "the cache", history)
                report = cache.report
                require(
                    report.stored_bytes == report.predicted_bytes,
                    f"{report.stored_bytes} bytes stored, {report.predicted_bytes} predicted",
                )

    def _compare(
        self, got: tuple[Any, Any], coded: int, what: str, history: History | None = None
    ) -> None:
        history = history or self.history
        first = self.bound.method.sinks
        came = history.came
        if came is None:
            return
        for a, b, x in zip(got, history.dense(coded, got), (came.keys, came.values), strict=True):
            require_same_decoding(a, b, x, what)
            places = (slice(0, first if coded else None), slice(first + coded, None))
            for place in places:
                require_equal(a[:, :, place], b[:, :, place], f"exact rows of {what}")
