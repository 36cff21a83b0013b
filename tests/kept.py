"""The conversations that mlx-lm's server keeps, and the bytes of their arrays, found by walking."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import LRUPromptCache

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.walk import reachable_arrays


def conversations(kept: LRUPromptCache) -> list[tuple[list[int], list[Any]]]:
    """Tokens and caches of each."""
    keys = [key for lru in kept._lru._lrus.values() for key in lru]
    return [(list(tokens), kept._trie.get(model, tokens).prompt_cache) for model, tokens in keys]


def walked_bytes(caches: list[Any]) -> int:
    """Bytes of what a conversation has of its own: tables are the method's."""
    own = [
        (c.exact, c.store, c.constants) if isinstance(c, CompressedKVCache) else c for c in caches
    ]
    return sum(int(array.nbytes) for array in reachable_arrays(own))
