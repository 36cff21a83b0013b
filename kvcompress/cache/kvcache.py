"""The cache of one layer, as mlx-lm's models use it: sinks, codes, recent rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvcompress.attention import DEFAULT_BUDGET
from kvcompress.cache.accounting import LayerReport, layer_report
from kvcompress.cache.chunk import check_chunk, check_count
from kvcompress.cache.coded import Coded
from kvcompress.cache.coding import Coding
from kvcompress.cache.drafts import LONGEST, Drafts, DraftStep
from kvcompress.cache.figures import Figures
from kvcompress.cache.promise import Promise
from kvcompress.cache.received import Witness
from kvcompress.cache.step import Step
from kvcompress.cache.store import CodeStore, ExactRows
from kvcompress.cache.view import View, views
from kvcompress.codec import KVCodec
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec

if TYPE_CHECKING:
    from kvcompress.cache.batch import CompressedBatchCache
    from kvcompress.cache.dispatch import Lease
    from kvcompress.method import CompressionMethod


class CompressedKVCache(Figures):
    """A layer's keys and values: the first and last tokens exact, the rest as codes.

    How many tokens are coded depends on how many were seen, never on how they arrived: whole
    blocks beyond the sinks and the window. A query attends exactly to the sinks, to its own
    chunk, and to what was exact when the chunk arrived; to the rest through the codes.

    A codec with a careful assignment for some tokens has its cache wait with a step's coding until
    the step's queries were seen, or until anything else looks at it.

    Args:
        method: The method, which gives ``window``, ``sinks`` and ``block``.
        layer: The layer.
        codec: The method bound to the layer.
        lease: Kept alive with the cache; holds the attention hook in place.
        shared: Whether other layers read this cache too. They then get what its own layer got
            in that step, which is kept until the step ends.
        budget: Bytes of transients that attention may hold.
    """

    def __init__(
        self,
        method: CompressionMethod,
        layer: LayerSpec,
        codec: KVCodec,
        lease: Lease | None = None,
        shared: bool = False,
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        self.method = method
        self.layer = layer
        self.codec = codec
        self.offset = 0
        self.lease = lease
        self.shared = shared
        self._step: Step | None = None
        self._drafts = None
        self._due = None
        self._ticket: object = None  # of the step whose queries are to be seen
        self._promise: Promise | None = None  # of the codes as they stand
        self._computes = False  # the model computes with what it was promised
        self._budget = budget
        self.exact = ExactRows()
        self.store = CodeStore(codec.schema)
        self.constants: dict[str, mx.array] = {}

    # -- how many tokens are coded ---------------------------------------------------------

    @property
    def _steady(self) -> int:
        """Exact rows held between steps of a long sequence."""
        return self.method.sinks + max(self.method.window, 0) + self._block

    def coded_at(self, seen: int) -> int:
        """Tokens that are coded once ``seen`` tokens have been seen."""
        beyond = seen - self.method.sinks - max(self.method.window, 0)
        if beyond < max(self.codec.warmup, 1):
            return 0
        return beyond - beyond % self._block

    def coded_after(self, more: int) -> int:
        """Tokens that are coded once ``more`` tokens came."""
        return max(self.coded_at(self.offset + more), self.store.tokens)

    # -- what models call ------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        """Add a chunk and hand out what this step attends to.

        Args:
            keys: ``(B, Hkv, L, D)``, rotated.
            values: ``(B, Hkv, L, Dv)``.

        Returns:
            Two lazy views: arrays of all tokens for whoever computes with them, this cache for
            the attention call that recognises them.

        Raises:
            ConfigError: Where the chunk does not fit the layer or what is already held.
        """
        step = self.advance(keys, values)
        return views(*step.dense, step)

    def advance(self, keys: mx.array, values: mx.array) -> Step:
        """Add a chunk; what its queries attend to."""
        check_chunk(self.method.name, self.layer, self.batch, keys, values)
        self.complete()
        short = 1 < keys.shape[2] <= LONGEST
        step = self._hold(Drafts(keys, values)) if short else self.append(keys, values)
        self._step = step if self.shared else None
        return step

    def _hold(self, drafts: Drafts) -> DraftStep:
        """Let a chunk stand beside the cache; what its queries attend to."""
        rows = self._joined(drafts.keys, drafts.values)
        before = copy.deepcopy(self)
        step = DraftStep(self._coded_part(), *rows, self._budget, cache=before, drafts=drafts)
        self._drafts, self._ticket = drafts, None
        self.offset += drafts.length
        return step

    def append(self, keys: mx.array, values: mx.array) -> Step:
        """Add a chunk for good, whatever its length; what its queries attend to."""
        seen = self.offset + keys.shape[2]
        target = self.coded_after(keys.shape[2])
        coded, sealed = self._coded_part(), len(self.store.sealed)
        if self.codec.chooses:
            self.exact.unjudged(keys.shape[0], self.exact.used + keys.shape[2])
        if target == self.store.tokens:
            self.exact.append(keys, values, self._steady)
            all_keys, all_values = self.exact.rows()
        else:
            all_keys, all_values = self._joined(keys, values)
            self._due = all_keys, all_values, target
        step = Step(coded, all_keys, all_values, self._budget)
        self.offset = seen
        if self.codec.chooses and self.method.window > 0:
            ticket = self._ticket = object()
            tell = partial(self._judge, ticket, sealed)
            step.witness = Witness(self.method.window, self.method.sinks, tell)
        else:
            self.complete()
        if self._due is None:
            step.settle = self._settle(sealed)
        return step

    def _settle(self, sealed: int) -> list[mx.array]:
        return [*self.exact.arrays(), *self.store.arrays(since=sealed)]

    def _judge(self, ticket: object, sealed: int, given: mx.array) -> list[mx.array]:
        """Add what a step's exact rows received, ``(B, n)``, and code what was waiting for it."""
        if ticket is not self._ticket or self.exact.received is None:
            return []
        self.exact.received = self.exact.received + given[:, None, :, None]
        self.complete()
        return self._settle(sealed)

    def complete(self) -> None:
        """Code what waits for a step's queries, by what is known so far.

        Done of itself when attention has seen them, and when anything else looks at the cache.
        Drafts that were not taken back are added first.
        """
        if self._drafts is not None:
            drafts, self._drafts = self._drafts, None
            self.offset -= drafts.length
            drafts.append_to(self)
        if self._due is not None:
            due, self._due, self._ticket = self._due, None, None
            if self._promise is not None:
                self._computes, self._promise = self._promise.kept, None
            how = Coding(self.codec, self.method.sinks, self._block, self._steady)
            self.constants = how.code(self.exact, self.store, self.constants, *due)

    def come_to_rest(self) -> None:
        """Complete, and compute what that makes: another thread may have looked, or go on."""
        if self._drafts is not None or self._due is not None:
            self.complete()
            mx.eval(*self._held())

    def _coded_part(self) -> Coded:
        """The coded tokens, for a step.

        Their promise goes on from step to step, but for a model that computes with the arrays
        beside attention: they would stay, every token decoded.
        """
        promise = self._promise
        if promise is None or not promise.serves:
            promise = Promise()
            self._promise = None if self._computes else promise
        return self._coded_now(promise)

    def _coded_now(self, promise: Promise) -> Coded:
        runs = list(self.store.blocks())
        start = min(self.method.sinks, self.exact.used) if runs else 0
        return Coded(self.codec, runs, self.constants, start, promise)

    def _joined(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The exact rows with a chunk after them, leaving what is held as it is."""
        if not self.exact.used:
            return keys, values
        old_keys, old_values = self.exact.rows()
        return (
            mx.concatenate([old_keys, keys], axis=2),
            mx.concatenate([old_values, values], axis=2),
        )

    def keys_and_values(self) -> tuple[View, View]:
        """The cache as it stands, in the model's frame: what a next step would attend to.

        Within a step of a shared cache, what its own layer attends to.
        """
        step = self._step or self.now()
        return views(*step.dense, step)

    def now(self) -> Step:
        """What a next step would attend to."""
        if self.empty():
            raise ConfigError(f"{self.method.name}: layer {self.layer.index}: the cache is empty")
        self.come_to_rest()
        return Step(self._coded_now(Promise()), *self._rows(), self._budget)

    def _rows(self) -> tuple[mx.array, mx.array]:
        if self.exact.keys is not None:
            return self.exact.rows()
        batch, layer = self.batch, self.layer
        return (
            mx.zeros((batch, layer.kv_heads, 0, layer.head_dim), layer.mx_dtype),
            mx.zeros((batch, layer.kv_heads, 0, layer.value_dim), layer.mx_dtype),
        )

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of a chunk of ``N`` tokens that comes next, as mlx-lm makes it."""
        from mlx_lm.models.cache import create_attention_mask

        mask: mx.array | str | None = create_attention_mask(
            N, self.offset, return_array=return_array, window_size=window_size
        )
        return mask

    # -- the rest of mlx-lm's contract -----------------------------------------------------

    def is_trimmable(self) -> bool:
        """Tokens can always be taken back."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens; what was coded before them stays coded.

        Returns:
            How many were forgotten: ``n``, or all there were.

        Raises:
            ConfigError: ``n`` is no integer, or negative.
        """
        n = min(check_count(self.method.name, n), self.offset)
        drafts, self._drafts = self._drafts, None
        if drafts is not None:
            self._step = None
            self._drafts = drafts.without_last(n)
            taken = min(n, drafts.length)
            self.offset -= taken
            if self._drafts is not None:
                mx.eval(*self._drafts.arrays())
            return taken + self.trim(n - taken) if n > taken else taken
        self.complete()
        self._step = self._ticket = self._promise = None
        sinks = min(self.method.sinks, self.exact.used) if self.store.tokens else 0
        recent = min(n, self.exact.used - sinks)
        self.exact.forget(recent)
        coded = min(n - recent, self.store.tokens)
        if coded:
            self.store.keep(self.store.tokens - coded)
            if not self.store.tokens:
                self.constants = {}
        self.exact.forget(n - recent - coded)
        self.offset -= n
        mx.eval(*self._held())
        return n

    def compact(self) -> None:
        """Let go of the room for tokens to come, in a sequence that is put aside.

        It is made anew when the sequence goes on.
        """
        self.come_to_rest()
        self._promise = None
        self.exact, self.store = self.exact.without_room(), self.store.without_room()
        mx.eval(*self._held())

    @property
    def report(self) -> LayerReport:
        """The numbers of this layer."""
        return layer_report(self)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything needed to go on: a JSON header, then arrays."""
        from kvcompress.cache.state import pack_state

        self._step = None  # mlx-lm reads the state when a step is over
        return pack_state(self)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        from kvcompress.cache.state import unpack_state

        unpack_state(self, state)  # a refused state leaves all as it was
        self._step = self._ticket = self._due = self._drafts = self._promise = None

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> CompressedKVCache:
        """A cache that goes on where ``state`` was taken."""
        from kvcompress.cache.state import restore

        return restore(state)

    @staticmethod
    def merge(caches: Sequence[CompressedKVCache]) -> CompressedBatchCache:
        """A batch of copies of single caches, each row as compressed as before."""
        from kvcompress.cache.batch import CompressedBatchCache

        return CompressedBatchCache.merge(caches)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedKVCache:
        """An independent sequence that shares the method's tables."""
        new = CompressedKVCache(
            self.method, self.layer, self.codec, self.lease, self.shared, self._budget
        )
        if self._drafts is None:
            self.come_to_rest()
        new._drafts = self._drafts
        new.offset = self.offset
        new.exact = self.exact.copy()
        new.store = self.store.copy()
        new.constants = dict(self.constants)
        return new

    def __repr__(self) -> str:
        return (
            f"CompressedKVCache({self.method.name}, layer {self.layer.index}, "
            f"{self.offset} tokens, {self.tokens_coded} coded)"
        )
