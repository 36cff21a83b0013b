"""The pass-through in front of a model's attention call, which sends our views to their step.

mlx-lm's model modules import ``scaled_dot_product_attention`` by name. While a lease is held, that
global of the modules a model runs through is a pass-through: a pair of views goes to
:meth:`~kvcompress.cache.view.Attends.attend`, everything else to what stood there before.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import mlx.core as mx
from attrs import define
from mlx.nn.layers.base import Module

from kvcompress.cache.view import View, step_of

NAME = "scaled_dot_product_attention"

Attention = Callable[..., mx.array]


class Lease:
    """Keeps a model's attention hooked until it is released or garbage-collected.

    Attributes:
        model: The model, weakly; its caches know by it what they belong to.
    """

    def __init__(self, hooked: tuple[int, ...], model: Module) -> None:
        self.model = weakref.ref(model)
        self._finalizer = weakref.finalize(self, _give_back, hooked)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Give the lease back; a second time does nothing."""
        self._finalizer()
        with _lock:
            _settle()
        _drain()

    def __copy__(self) -> Lease:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        return self


def install(model: Module) -> Lease:
    """Hook every module that the model's attention runs through.

    A module that is hooked already, for this model or another of its family, is shared; its
    global is what it was before once the last lease is back. A global that somebody else replaced
    in the meantime is left to them.

    Args:
        model: An mlx-lm model.

    Returns:
        The lease; an empty one where no module of the model has the attention call as a global.
    """
    namespaces = list(_namespaces(model))
    with _lock:
        _settle()
        hooked = tuple(_hook(namespace) for namespace in namespaces)
    _drain()
    return Lease(hooked, model)


@define
class _Hook:
    """One hooked module: what stood there, what stands there now, and how many leases need it."""

    namespace: dict[str, Any]
    original: Attention
    installed: Attention
    leases: int = 0


_lock = threading.Lock()
_hooks: dict[int, _Hook] = {}  # by the identity of the module's namespace
_ours: weakref.WeakSet[Attention] = weakref.WeakSet()
_returned: deque[tuple[int, ...]] = deque()  # leases given back, not yet taken off the counts


def _hook(namespace: dict[str, Any]) -> int:
    key = id(namespace)
    hook = _hooks.get(key)
    if hook is None:
        original = namespace[NAME]
        while original in _ours:  # put back by somebody who had replaced it, after its time
            original = original.__wrapped__
        hook = _hooks[key] = _Hook(namespace, original, _pass_through(original))
        namespace[NAME] = hook.installed
    hook.leases += 1
    return key


def _give_back(hooked: tuple[int, ...]) -> None:
    """Return a lease; garbage collection runs it amid any other code, so it never waits."""
    _returned.append(hooked)
    _drain()


def _drain() -> None:
    """Settle returned leases unless somebody holds the lock, who drains in their turn."""
    while _returned and _lock.acquire(blocking=False):
        try:
            _settle()
        finally:
            _lock.release()


def _settle() -> None:
    """Take returned leases off the counts and restore what no lease needs; the lock is held."""
    while _returned:
        for key in _returned.popleft():
            hook = _hooks[key]
            hook.leases -= 1
            if hook.leases:
                continue
            del _hooks[key]
            if hook.namespace.get(NAME) is hook.installed:
                hook.namespace[NAME] = hook.original


def modules_of(model: Module) -> list[Module]:
    """The model and all modules below it."""
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    return modules


def _namespaces(model: Module) -> Iterator[dict[str, Any]]:
    """The globals, each once, in which the classes of a model's modules find the call."""
    seen: set[int] = set()
    for kind in {type(module) for module in modules_of(model)}:
        for namespace in _globals_of(kind):
            if id(namespace) not in seen and callable(namespace.get(NAME)):
                seen.add(id(namespace))
                yield namespace


def _globals_of(kind: type) -> Iterator[dict[str, Any]]:
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        if module is not None:
            yield vars(module)
        # A model file loaded by its path stands in no table of modules.
        yield from (f.__globals__ for f in vars(base).values() if isinstance(f, FunctionType))


def _pass_through(original: Attention) -> Attention:
    """Attention that lets a pair of views answer, and ``original`` everything else."""

    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any
    ) -> mx.array:
        if type(keys) is View or type(values) is View:
            return _attend(original, queries, keys, values, args, kwargs)
        return original(queries, keys, values, *args, **kwargs)

    scaled_dot_product_attention.__wrapped__ = original  # type: ignore[attr-defined]
    _ours.add(scaled_dot_product_attention)
    return scaled_dot_product_attention


def _attend(
    original: Attention,
    queries: mx.array,
    keys: Any,
    values: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> mx.array:
    step = step_of(keys, values)
    call = _understood(*args, **kwargs) if step is not None else None
    if step is not None and call is not None:
        return step.attend(queries, **call)
    for array, part in ((keys, "key"), (values, "value")):
        if type(array) is View and array.part != part and hasattr(array.step, "misread"):
            array.step.misread()  # a trace wants to know
    return original(queries, keys, values, *args, **kwargs)


def _understood(
    cache: object = None,
    scale: float | None = None,
    mask: Any = None,
    sinks: mx.array | None = None,
    *more: Any,
    **others: Any,
) -> dict[str, Any] | None:
    """The call's arguments; ``None`` if it has one unknown here, which dense arrays then serve."""
    if scale is None or more or others:
        return None
    return {"scale": scale, "mask": mask, "sinks": sinks}
