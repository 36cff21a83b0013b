"""What a cache and ``mx.fast.rope`` are replaced by while a model is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from attrs import define, field, frozen
from mlx_lm.models.cache import KVCache

from kvcompress.cache.view import views

FAR = 1 << 24  # a position beyond any context, up to which float32 counts exactly


@frozen(eq=False)
class Turn:
    """The arguments of one call of ``mx.fast.rope``."""

    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: mx.array | None
    offset: int | mx.array


class Turned(mx.array):
    """A result of ``mx.fast.rope``; any later operation on it gives a plain array."""

    turn: Turn


@frozen
class Write:
    """One chunk as the model stored it.

    Attributes:
        offset: Tokens held before it.
        keys: Shape of the keys.
        values: Shape of the values.
        dtypes: Dtypes of both.
        turn: The rotation that the keys bear.
        rotated: Whether something was rotated before this write that may be part of the keys.
        latent: Whether the values bear a rotation.
    """

    offset: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtypes: tuple[mx.Dtype, mx.Dtype]
    turn: Turn | None
    rotated: bool
    latent: bool


@frozen(eq=False)
class Read:
    """One attention call over a cache's tokens."""

    query_heads: int
    scale: float | None
    mask: str
    sinks: bool


@define
class Run:
    """What one run of the model did with one cache."""

    writes: list[Write] = field(factory=list)
    reads: list[Read] = field(factory=list)
    fetches: int = 0  # times the cache handed out its tokens
    misread: bool = False  # whether attention got its keys as values, or its values as keys


@define(eq=False)
class Watch:
    """What all probes of a trace share.

    Attributes:
        turns: Calls of ``mx.fast.rope`` since a cache was last written or read.
    """

    turns: int = 0


class Probe(KVCache):  # type: ignore[misc]
    """Stands in for a plain cache and notes what the model does with it.

    Attributes:
        runs: What each run of the model did so far.
        bypassed: Whether the model took the arrays past the cache's interface.
    """

    def __init__(self, watch: Watch) -> None:
        self.offset = 0
        self.runs: list[Run] = []
        self.bypassed = False
        self.watch = watch
        self._held: tuple[mx.array, mx.array] | None = None
        self._step: ProbeStep | None = None

    def begin(self, *, far: bool = False) -> None:
        """Start noting the next run; ``far``: as if there had been :data:`FAR` tokens."""
        self.runs.append(Run())
        if far:
            self.offset, self._held = FAR, None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Note the chunk; hand out views of all chunks since the start, or since ``far``."""
        turn = keys.turn if type(keys) is Turned else None
        self.runs[-1].writes.append(
            Write(
                self.offset,
                keys.shape,
                values.shape,
                (keys.dtype, values.dtype),
                turn,
                rotated=turn is not None or self.watch.turns > 0,
                latent=type(values) is Turned,
            )
        )
        self.watch.turns = 0
        self.offset += keys.shape[-2]
        if self._held is not None:
            keys = mx.concatenate([self._held[0], keys], axis=-2)
            values = mx.concatenate([self._held[1], values], axis=-2)
        self._held = keys, values
        self._step = ProbeStep(self, values.shape[-1])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views of the tokens."""
        if self._held is None or self._step is None:
            raise ValueError("the model reads a cache before it has written to it")
        self.runs[-1].fetches += 1
        return views(*self._held, self._step)

    def _array(self, part: int) -> mx.array | None:
        self.bypassed = True
        return None if self._held is None else self._held[part]

    def _set(self, part: int, value: Any) -> None:
        self.bypassed = True
        if self._held is not None:
            self._held = (value, self._held[1]) if part == 0 else (self._held[0], value)

    keys = property(lambda self: self._array(0), lambda self, value: self._set(0, value))
    values = property(lambda self: self._array(1), lambda self, value: self._set(1, value))

    def empty(self) -> bool:
        """Whether no token was stored."""
        return self._held is None


class ProbeStep:
    """Notes the attention calls over one probe's views, and answers with zeros."""

    def __init__(self, probe: Probe, value_dim: int) -> None:
        self._run = probe.runs[-1]
        self._watch = probe.watch
        self._value_dim = value_dim

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Note a call of ``(B, Hq, L, D)`` queries: zeros ``(B, Hq, L, Dv)``."""
        self._watch.turns = 0
        known = float(scale) if isinstance(scale, int | float) else None
        self._run.reads.append(Read(queries.shape[1], known, _kind(mask), sinks is not None))
        return mx.zeros((*queries.shape[:3], self._value_dim), queries.dtype)

    def misread(self) -> None:
        """Note that attention got keys in the place of values, or the reverse."""
        self._run.misread = True


def _kind(mask: mx.array | str | None) -> str:
    if isinstance(mask, mx.array):
        return "bool" if mask.dtype == mx.bool_ else "additive"
    return mask or "none"


def watch_writes(cache: Any, watch: Watch) -> None:
    """Let a cache that is not probed end the layer that its keys were rotated for."""
    update: Callable[..., Any] | None = getattr(cache, "update_and_fetch", None)
    if update is None:
        return

    def update_and_fetch(*args: Any, **kwargs: Any) -> Any:
        watch.turns = 0
        return update(*args, **kwargs)

    cache.update_and_fetch = update_and_fetch


@contextmanager
def watched_rope(watch: Watch) -> Iterator[None]:
    """Let results of ``mx.fast.rope`` remember, in this thread, the arguments that made them."""
    original, thread = mx.fast.rope, threading.get_ident()

    def rope(a: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out = original(a, *args, **kwargs)
        if threading.get_ident() != thread:
            return out
        watch.turns += 1
        if type(a) is Turned:  # rotated twice: no rotation that is known
            return out
        turned = Turned(out)
        turned.turn = _turn(*args, **kwargs)
        return turned

    mx.fast.rope = rope
    try:
        yield
    finally:
        if mx.fast.rope is rope:
            mx.fast.rope = original


def _turn(
    dims: int,
    *,
    traditional: bool = False,
    base: float | None = None,
    scale: float = 1.0,
    offset: int | mx.array = 0,
    freqs: mx.array | None = None,
    **_: Any,
) -> Turn:
    return Turn(dims, traditional, base, scale, freqs, offset)
