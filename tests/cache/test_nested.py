from __future__ import annotations

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from kvcompress.cache.nested import leaves, with_leaves


def test_bundled_caches_are_counted_in_their_place() -> None:
    a, b, c, d = KVCache(), ArraysCache(1), KVCache(), KVCache()
    assert leaves([a, CacheList(b, CacheList(c)), CacheList(), d]) == [a, b, c, d]
    assert leaves([]) == []


def test_a_bundle_is_kept_with_other_caches_in_it() -> None:
    bundle, inner = CacheList(KVCache(), KVCache()), CacheList(KVCache())
    bundle.caches = (*bundle.caches, inner)
    new = [KVCache() for _ in range(4)]
    made = with_leaves([KVCache(), bundle], iter(new))
    assert made == [new[0], bundle]
    assert bundle.caches == (new[1], new[2], inner)
    assert inner[0] is new[3]
