"""Learn what a model's layers are by running it, unevaluated, on a few tokens."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache

from kvcompress.cache.binding import check_model
from kvcompress.cache.dispatch import install, modules_of
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.native import native_caches
from kvcompress.cache.nested import leaves, with_leaves
from kvcompress.cache.probe import Probe, Watch, watch_writes, watched_rope
from kvcompress.cache.slot import CHUNK, Slot, plain_slot, probed_slot
from kvcompress.errors import ConfigError, UnsupportedModel

__all__ = ["Slot", "trace"]

Signature = tuple[tuple[object, ...], ...]

_lock = threading.Lock()
_known: dict[int, tuple[Signature, tuple[Slot, ...]]] = {}  # by the model's identity


def trace(model: Module) -> tuple[Slot, ...]:
    """Learn the layer behind each of a model's caches.

    The model runs on three tokens, on one, and on one far away, with probes in place of its plain
    caches. Nothing is computed but the wave lengths and offsets of rotations, and the model is
    left as it was. The result is kept until the model goes, or its modules or dtypes change.

    Args:
        model: An mlx-lm model.

    Returns:
        One slot a cache of the list that the model makes; those that it bundles in a
        ``CacheList`` have each their own.

    Raises:
        UnsupportedModel: The model cannot be run this way.
        ConfigError: It is no model, or a part of it has a method attached.
    """
    check_model("make_cache", model)
    with _lock:
        signature = _signature(model)
        known = _known.get(id(model))
        if known is not None and known[0] == signature:
            return known[1]
        slots = _learn(model)
        if known is None:
            weakref.finalize(model, _known.pop, id(model), None).atexit = False
        _known[id(model)] = signature, slots
        return slots


def _signature(model: Module) -> Signature:
    """Changes when a module is replaced or a parameter changes its dtype."""
    return tuple(
        (id(m), *(v.dtype for v in m.values() if isinstance(v, mx.array)))
        for m in modules_of(model)
    )


def _learn(model: Module) -> tuple[Slot, ...]:
    lease, watch = install(model), Watch()
    try:
        with _unchanged(model), watched_rope(watch):
            entries = _probed(native_caches(model), watch)
            _run(model, entries, CHUNK)
            _run(model, entries, 1)
            # A model that cannot be so far away has no rotation that shows only there.
            with contextlib.suppress(Exception):
                _run(model, entries, 1, far=True)
    except (ConfigError, UnsupportedModel):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{_name(model)}: its layers cannot be learnt, since running it on {CHUNK} tokens "
            f"failed ({type(error).__name__}: {error})"
        ) from error
    finally:
        lease.release()
    return tuple(_slots(entries))


def _probed(caches: list[Any], watch: Watch) -> list[Any]:
    """The caches with a probe in place of each plain one."""
    own = leaves(caches)
    if any(isinstance(c, CompressedKVCache) for c in own):
        raise ConfigError(
            "trace: a method is attached to a part of the model; call kvcompress.detach on it first"
        )
    for cache in own:
        if type(cache) is not KVCache:
            watch_writes(cache, watch)
    return with_leaves(caches, (Probe(watch) if type(c) is KVCache else c for c in own))


def _run(model: Module, entries: list[Any], tokens: int, *, far: bool = False) -> None:
    for cache in leaves(entries):
        if isinstance(cache, Probe):
            cache.begin(far=far)
    model(mx.zeros((1, tokens), mx.int32), cache=entries)


def _slots(entries: list[Any]) -> Iterator[Slot]:
    """What each cache was found to be.

    A layer has its entry's place for a number; further layers of one entry count on from the end.
    """
    beyond = itertools.count(len(entries))
    for place, entry in enumerate(entries):
        numbers = itertools.chain([place], beyond)
        for cache in leaves([entry]):
            if isinstance(cache, Probe):
                yield probed_slot(place, cache, next(numbers))
            else:
                yield plain_slot(place, cache)


@contextlib.contextmanager
def _unchanged(model: Module) -> Iterator[None]:
    """Undo what a run leaves on a model: its mode, and arrays that a module keeps for later.

    Such an array belongs to this thread while it is not computed, and would fail in another.
    """
    before = [(m, dict(m), dict(vars(m))) for m in modules_of(model)]
    model.eval()  # no dropout, which would draw random numbers
    try:
        yield
    finally:
        for module, items, attributes in before:
            _put_back(module, items)
            _put_back(vars(module), attributes)


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    if now.keys() != before.keys() or any(now[k] is not v for k, v in before.items()):
        dict.clear(now)  # a module has an update() of its own
        dict.update(now, before)


def _name(model: Module) -> str:
    return type(model).__module__.removeprefix("mlx_lm.models.")
