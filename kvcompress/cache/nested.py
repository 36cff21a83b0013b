"""The single caches of a model's list, some of which it may bundle in mlx-lm's ``CacheList``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def leaves(caches: Iterable[Any]) -> list[Any]:
    """Every single cache in order, those of a ``CacheList`` in its place."""
    from mlx_lm.models.cache import CacheList

    flat: list[Any] = []
    for cache in caches:
        flat += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return flat


def with_leaves(caches: Iterable[Any], new: Iterator[Any]) -> list[Any]:
    """The list with other single caches; each ``CacheList`` is kept, and changed in place.

    Args:
        caches: A model's list of caches.
        new: What stands in the place of each of its :func:`leaves`.
    """
    from mlx_lm.models.cache import CacheList

    def put(cache: Any) -> Any:
        if not isinstance(cache, CacheList):
            return next(new)
        cache.caches = tuple(with_leaves(cache.caches, new))
        return cache

    return [put(cache) for cache in caches]
