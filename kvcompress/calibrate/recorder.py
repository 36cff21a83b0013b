"""Recording one layer: a cache that behaves as the plain one, and what it sees on the way."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from kvcompress.cache.view import views
from kvcompress.calibrate.samples import LayerMoments, LayerSamples
from kvcompress.calibrate.sums import ChannelSums, SecondMoment
from kvcompress.errors import UnsupportedModel
from kvcompress.layers import LayerSpec

Array = NDArray[np.float32]
Rows = NDArray[np.intp]

SKIP = 4  # first tokens of a window: attention sinks, which caches keep exact by default


@define(eq=False)
class LayerRecorder:
    """What a layer has shown so far: running sums over every token, and the sampled rows.

    Memory depends on the sample's size, never on the length of the text.

    Attributes:
        layer: The layer.
        skip: First tokens of each window that are left out.
    """

    layer: LayerSpec
    skip: int = SKIP
    _keys: ChannelSums = field(init=False)
    _post_keys: ChannelSums = field(init=False)
    _values: ChannelSums = field(init=False)
    _queries: SecondMoment = field(init=False)
    _post_queries: SecondMoment = field(init=False)
    _sampled: dict[str, list[Any]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        keys = (self.layer.kv_heads, self.layer.head_dim)
        self._keys, self._post_keys = ChannelSums(keys), ChannelSums(keys)
        self._values = ChannelSums((self.layer.kv_heads, self.layer.value_dim))
        self._queries, self._post_queries = SecondMoment(keys), SecondMoment(keys)
        names = ("keys", "positions", "values", "queries", "query_positions")
        self._sampled = {name: [] for name in names}

    def add_tokens(self, keys: mx.array, values: mx.array, start: int, chosen: Rows) -> None:
        """Take in a chunk's keys and values.

        Args:
            keys: ``(1, H, L, D)``, rotated.
            values: ``(1, H, L, Dv)``.
            start: Position of the chunk's first token.
            chosen: The window's positions to sample, in order.
        """
        plain = self._unrotated(keys, start)
        first = max(self.skip - start, 0)
        pre, post, val = (_rows(x)[:, first:] for x in (plain, keys, values))
        self._keys.add(pre)
        self._post_keys.add(post)
        self._values.add(val)
        places = _within(chosen, start + first, start + keys.shape[2])
        rows = places - start - first
        # Copies, so that a few rows do not keep the whole chunk.
        self._sampled["keys"].append(pre[:, rows].swapaxes(0, 1).copy())
        self._sampled["values"].append(val[:, rows].swapaxes(0, 1).copy())
        self._sampled["positions"].append(places)

    def add_queries(self, queries: mx.array, start: int, chosen: Rows) -> None:
        """Take in a chunk's queries ``(1, Hq, L, D)``, rotated; the rest as `add_tokens`."""
        first = max(self.skip - start, 0)
        L = queries.shape[2]
        pre = self._grouped(self._unrotated(queries, start))[:, :, first:]
        post = self._grouped(queries)[:, :, first:]
        H, D = pre.shape[0], pre.shape[3]
        self._queries.add(pre.reshape(H, -1, D))
        self._post_queries.add(post.reshape(H, -1, D))
        places = _within(chosen, start + first, start + L)
        rows = places - start - first
        self._sampled["queries"].append(pre[:, :, rows].transpose(2, 0, 1, 3).copy())
        self._sampled["query_positions"].append(places)

    def _unrotated(self, x: mx.array, start: int) -> mx.array:
        wide = x.astype(mx.float32)
        rotary = self.layer.rotary
        return wide if rotary is None else rotary.unrotate(wide, range(start, start + x.shape[2]))

    def _grouped(self, queries: mx.array) -> Array:
        H = self.layer.kv_heads
        rows = _rows(queries)
        return rows.reshape(H, -1, *rows.shape[1:])

    def finish(self) -> LayerSamples:
        """Everything recorded; the recorder is empty afterwards.

        Raises:
            UnsupportedModel: Keys, values or queries are not finite numbers.
        """
        layer = self.layer
        moments = LayerMoments(
            tokens=self._keys.count,
            queries=self._queries.count,
            key_mean=self._keys.mean,
            key_variance=self._keys.variance,
            key_max=self._keys.largest,
            post_key_mean=self._post_keys.mean,
            post_key_variance=self._post_keys.variance,
            post_key_max=self._post_keys.largest,
            value_mean=self._values.mean,
            value_variance=self._values.variance,
            value_max=self._values.largest,
            query_moment=self._queries.moment,
            post_query_moment=self._post_queries.moment,
        )
        for name in ("key_variance", "value_variance", "query_moment"):
            if not np.isfinite(getattr(moments, name)).all():
                raise UnsupportedModel(
                    f"calibrate: layer {layer.index}: {name} is not finite; the model does not "
                    f"compute in this dtype ({layer.dtype}): load it in another, or check it"
                )
        heads, width = layer.kv_heads, layer.head_dim
        return LayerSamples(
            layer=layer,
            keys=self._take("keys", (heads, width), np.float32),
            positions=self._take("positions", (), np.intp),
            values=self._take("values", (heads, layer.value_dim), np.float32),
            queries=self._take("queries", (heads, layer.group, width), np.float32),
            query_positions=self._take("query_positions", (), np.intp),
            moments=moments,
        )

    def _take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        parts = self._sampled[name]
        self._sampled[name] = []
        return np.concatenate([np.empty((0, *shape), dtype), *parts])


class RecordingCache:
    """The model's own cache of one layer for one window, which shows the recorder what it gets.

    Args:
        plain: The cache that the model made.
        recorder: What takes the layer in.
        chosen: Positions of this window whose keys and values are sampled.
        chosen_queries: Positions of this window whose queries are sampled.
    """

    def __init__(
        self, plain: Any, recorder: LayerRecorder, chosen: Rows, chosen_queries: Rows
    ) -> None:
        self._plain = plain
        self._recorder = recorder
        self._chosen = chosen
        self._chosen_queries = chosen_queries
        self._start = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Record the chunk, and hand out what the plain cache does, as views."""
        self._start = self._plain.offset
        self._recorder.add_tokens(keys, values, self._start, self._chosen)
        return self._views(*self._plain.update_and_fetch(keys, values))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What another layer that reads this cache attends to."""
        return self._views(*self._plain.keys_and_values())

    def _views(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return views(keys, values, RecordingStep(self, keys, values))

    def see(self, queries: mx.array) -> None:
        """Record the queries of the last chunk, ``(1, Hq, L, D)``."""
        self._recorder.add_queries(queries, self._start, self._chosen_queries)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also before __init__, as copying asks
            raise AttributeError(name)
        return getattr(self._plain, name)


class RecordingStep:
    """Plain attention over a step's keys and values, which shows the recorder its queries."""

    def __init__(self, cache: RecordingCache, keys: mx.array, values: mx.array) -> None:
        self._cache = cache
        self._keys = keys
        self._values = values

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention as mlx-lm computes it, ``(B, Hq, L, D)`` to ``(B, Hq, L, Dv)``."""
        self._cache.see(queries)
        out: mx.array = mx.fast.scaled_dot_product_attention(
            queries, self._keys, self._values, scale=scale, mask=mask, sinks=sinks
        )
        return out


def _rows(x: mx.array) -> Array:
    """``(1, H, L, D)`` computed now, as ``(H, L, D)`` float32."""
    return np.array(x[0].astype(mx.float32))


def _within(positions: Rows, start: int, stop: int) -> Rows:
    return positions[(positions >= start) & (positions < stop)]
