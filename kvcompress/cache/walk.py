"""Find every array that an object keeps alive, by walking what it refers to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx

from kvcompress.cache.promise import Promise

_LEAVES = (str, bytes, int, float, bool, type(None), type)


def reachable_arrays(roots: Iterable[object]) -> Iterator[mx.array]:
    """Each distinct ``mx.array`` reachable through attributes, slots and containers.

    All but those that a :class:`~kvcompress.cache.promise.Promise` has not computed.

    Args:
        roots: Where to start.

    Yields:
        Arrays, each once.
    """
    seen: set[int] = set()
    stack: list[Any] = list(roots)
    while stack:
        item = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, mx.array):
            yield item
        elif isinstance(item, Promise) and not item.kept:
            continue
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif not callable(item) or hasattr(item, "__attrs_attrs__"):
            stack.extend(_attributes(item))


def _attributes(item: object) -> Iterator[object]:
    yield from getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__weakref__", "__dict__") and hasattr(item, name):
                yield getattr(item, name)
