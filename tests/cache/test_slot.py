from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvcompress.cache.slot import plain_slot
from kvcompress.cache.trace import Slot, trace
from kvcompress.layers import LayerSpec, Rotary
from tests.toy_model import DIM, HEADS, Attention, Toy, ordinary, rotated


def traced(layer: Any) -> Slot:
    (slot,) = trace(Toy(layer))
    return slot


def attend(attention: Attention, q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
    mask = "causal" if q.shape[2] > 1 else None
    return attention(q, k, v, cache=None, **{"scale": 0.5, "mask": mask, **more})


def test_an_ordinary_layer_is_learnt_in_full() -> None:
    slot = traced(ordinary)
    rotary = Rotary(DIM, base=100.0)
    layer = LayerSpec(0, HEADS, HEADS, DIM, DIM, "float32", rotary, True)
    masks = frozenset({"causal", "none"})
    assert slot == Slot(0, "compress", "", layer, True, 1, 0.5, False, masks)


def test_sizes_dtype_sinks_readers_and_masks_are_those_of_the_arrays() -> None:
    def layer(x: mx.array, cache: Any, attention: Attention) -> mx.array:
        q = mx.concatenate([x] * 3, axis=1).astype(mx.bfloat16)
        k, v = x.astype(mx.bfloat16), x[..., :6].astype(mx.bfloat16)
        k, v = cache.update_and_fetch(k, v)
        attend(attention, q, k, v, sinks=mx.zeros((6,)), mask=mx.zeros((1, 1)))
        return attend(attention, q, *cache.keys_and_values(), scale=0.25)

    slot = traced(layer)
    assert slot.layer == LayerSpec(0, HEADS, 6, DIM, 6, "bfloat16", None, True)
    assert (slot.readers, slot.scale, slot.sinks) == (2, None, True)
    assert slot.masks == {"additive", "causal", "none"}


def own_softmax(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    k, v = cache.update_and_fetch(rotated(x, cache.offset), x)
    return mx.softmax(x @ k.swapaxes(-1, -2), axis=-1) @ v


def cast(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    k, v = cache.update_and_fetch(rotated(x, cache.offset), x)
    return attend(attention, x, k.astype(mx.float32), v)


def only_one_token_is_hooked(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    k, v = cache.update_and_fetch(rotated(x, cache.offset), x)
    return attend(attention, x, k, v) if x.shape[2] == 1 else own(x, k, v)


def own(x: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return mx.softmax(x @ k.swapaxes(-1, -2), axis=-1) @ v


@pytest.mark.parametrize("layer", [own_softmax, cast, only_one_token_is_hooked])
def test_attention_that_does_not_meet_our_views_is_served_with_a_notice(layer: Any) -> None:
    slot = traced(layer)
    assert (slot.kind, slot.query_visible, slot.readers) == ("compress", False, 1)
    assert "each step decodes the layer" in slot.reason
    assert slot.layer is not None
    assert slot.layer.rotary == Rotary(DIM, base=100.0)


def latent_values(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    latent, rope = cache.update_and_fetch(x, rotated(x, cache.offset))
    return attend(attention, x, latent + 0, latent + 0, mask=x @ rope.swapaxes(-1, -2))


def keys_as_values(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    latent, _ = cache.update_and_fetch(x, x)
    if x.shape[2] > 1:
        return attend(attention, x, latent + 0, latent + 0)
    return attend(attention, x, latent, latent)


def takes_arrays(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    k, v = cache.update_and_fetch(x, x)
    cache.keys = mx.depends(cache.keys, x)
    return attend(attention, x, k, v)


def writes_twice(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    cache.update_and_fetch(x, x)
    return attend(attention, x, *cache.update_and_fetch(x, x), mask=None)


def never_writes(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    return x


def no_heads(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    cache.update_and_fetch(x[:, 0], x[:, 0])
    return x


def other_heads(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    cache.update_and_fetch(x, x[:, :1])
    return x


def integers(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    cache.update_and_fetch(x.astype(mx.int32), x.astype(mx.int32))
    return x


def two_dtypes(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    cache.update_and_fetch(x.astype(mx.float16), x)
    return x


def odd_heads(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    k, v = cache.update_and_fetch(x, x)
    return attend(attention, mx.concatenate([x, x[:, :1]], axis=1), k, v)[:, :2]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (latent_values, "MLA"),
        (keys_as_values, "MLA"),
        (takes_arrays, "past the cache's interface"),
        (writes_twice, "several layers"),
        (never_writes, "no layer stores"),
        (no_heads, "not (B, heads, tokens, channels)"),
        (other_heads, "not (B, heads, tokens, channels)"),
        (integers, "got int32"),
        (two_dtypes, "got float16, float32"),
        (odd_heads, "2 key heads do not divide 3 query heads"),
    ],
)
def test_odd_use_of_a_cache_leaves_it_plain_and_says_why(layer: Any, reason: str) -> None:
    slot = traced(layer)
    assert (slot.kind, slot.layer) == ("unsupported", None)
    assert reason in slot.reason


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (RotatingKVCache(8), "window"),
        (ChunkedKVCache(8), "chunk"),
        (ArraysCache(2), "recurrent"),
        (QuantizedKVCache(), "quantised"),
        (ConcatenateKVCache(), "only plain KVCaches"),
    ],
)
def test_other_caches_are_plain(cache: Any, reason: str) -> None:
    slot = plain_slot(3, cache)
    assert (slot.index, slot.kind, slot.layer) == (3, "plain", None)
    assert reason in slot.reason
    assert type(cache).__name__ in slot.reason


def rotation(keys: Any) -> tuple[Rotary | None, bool]:
    def layer(x: mx.array, cache: Any, attention: Attention) -> mx.array:
        k, v = cache.update_and_fetch(keys(x, cache.offset), x)
        return attend(attention, x, k, v)

    slot = traced(layer)
    assert slot.layer is not None
    return slot.layer.rotary, slot.layer.rotary_known


FREQS = mx.array([1.0, 3.0, 20.0, float("inf")])


def test_the_rotation_is_that_of_the_call() -> None:
    assert rotation(lambda x, o: x) == (None, True)
    assert rotation(lambda x, o: rotated(x, o, scale=0.5)) == (
        Rotary(DIM, base=100.0, scale=0.5),
        True,
    )
    assert rotation(
        lambda x, o: mx.fast.rope(x, 4, traditional=True, base=9, scale=1, offset=o)
    ) == (
        Rotary(4, True, 9),
        True,
    )
    assert rotation(lambda x, o: rotated(x, o, base=None, freqs=FREQS)) == (
        Rotary(DIM, base=None, freqs=(1.0, 3.0, 20.0, float("inf"))),
        True,
    )
    assert rotation(lambda x, o: rotated(x, mx.array(o))) == (Rotary(DIM, base=100.0), True)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(lambda x, o: rotated(x, o) * 2, id="changed after rotation"),
        pytest.param(lambda x, o: rotated(rotated(x, o), o), id="rotated twice"),
        pytest.param(
            lambda x, o: mx.concatenate([x[..., :4], rotated(x, o)[..., 4:]], axis=-1), id="slice"
        ),
        pytest.param(lambda x, o: rotated(x, o + 1), id="other positions"),
        pytest.param(lambda x, o: rotated(x, 0), id="no positions"),
        pytest.param(lambda x, o: rotated(x, o, base=100.0 + o), id="base by position"),
        pytest.param(
            lambda x, o: rotated(x, o, base=100.0 if o < 1000 else 200.0), id="base by far position"
        ),
        pytest.param(lambda x, o: rotated(x, o) if o else x, id="only later"),
        pytest.param(lambda x, o: (rotated(x, o), x)[1], id="perhaps only the queries"),
    ],
)
def test_a_rotation_in_doubt_is_unknown(keys: Any) -> None:
    assert rotation(keys) == (None, False)


class Two(Toy):
    """Tells its layer whether it is the first of two."""

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        for entry in cache:
            entry.first = entry is cache[0]
        return super().__call__(tokens, cache)


def queries_last(x: mx.array, cache: Any, attention: Attention) -> mx.array:
    offset = cache.offset
    k, v = cache.update_and_fetch(rotated(x, offset), x)
    return attend(attention, rotated(x, offset), k, v)


@pytest.mark.parametrize("first", [ordinary, queries_last, own_softmax])
def test_a_layer_without_rotation_after_one_with_it_is_known_to_have_none(first: Any) -> None:
    def layer(x: mx.array, cache: Any, attention: Attention) -> mx.array:
        if cache.first:
            return first(x, cache, attention)
        return attend(attention, x, *cache.update_and_fetch(x, x))

    one, two = trace(Two(layer, caches=2))
    assert one.layer is not None
    assert two.layer is not None
    assert one.layer.rotary == Rotary(DIM, base=100.0)
    assert (two.layer.rotary, two.layer.rotary_known) == (None, True)
