"""What one layer's calibration records: moments of all tokens, and a sample of them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.layers import LayerSpec

Array = NDArray[np.float32]
Rows = NDArray[np.intp]


@frozen(eq=False)
class LayerMoments:
    """Moments of a layer over all recorded tokens, float32 from float64 sums.

    A text's windows begin with attention sinks, which every method keeps exact: they are left
    out. "Pre-RoPE" keys of a layer whose rotation is not known are as the cache sees them.

    Attributes:
        tokens: Tokens that the moments of keys and values are over.
        queries: Query vectors a KV head that the second moments are over: its group's heads, and
            every layer that reads this cache. 0 where the model hides its queries; the second
            moments are then the identity, under which a query-aware fit is an ordinary one.
        key_mean: ``(H, D)`` pre-RoPE.
        key_variance: ``(H, D)`` pre-RoPE, each channel's own.
        key_max: ``(H, D)`` largest magnitude, pre-RoPE.
        post_key_mean: ``(H, D)`` post-RoPE.
        post_key_variance: ``(H, D)`` post-RoPE.
        post_key_max: ``(H, D)`` largest magnitude, post-RoPE.
        value_mean: ``(H, Dv)``.
        value_variance: ``(H, Dv)``.
        value_max: ``(H, Dv)`` largest magnitude.
        query_moment: ``(H, D, D)``, ``E[q^T q]`` pre-RoPE.
        post_query_moment: ``(H, D, D)``, ``E[q^T q]`` post-RoPE.
    """

    tokens: int
    queries: int
    key_mean: Array
    key_variance: Array
    key_max: Array
    post_key_mean: Array
    post_key_variance: Array
    post_key_max: Array
    value_mean: Array
    value_variance: Array
    value_max: Array
    query_moment: Array
    post_query_moment: Array


@frozen(eq=False)
class LayerSamples:
    """A seeded sample of a layer's tokens, in the order of the text, with its moments.

    Attributes:
        layer: The layer.
        keys: ``(N, H, D)`` float32 pre-RoPE, or as they are where the rotation is not known.
        positions: ``(N,)`` positions of the keys within their windows.
        values: ``(N, H, Dv)`` float32.
        queries: ``(M, H, G, D)`` float32 pre-RoPE; none where the model hides its queries.
        query_positions: ``(M,)`` positions of the queries.
        moments: Over all tokens, sampled or not.
    """

    layer: LayerSpec
    keys: Array
    positions: Rows
    values: Array
    queries: Array
    query_positions: Rows
    moments: LayerMoments

    def post_keys(self, positions: Sequence[int] | Rows | None = None) -> Array:
        """The keys as a cache sees them, ``(N, H, D)`` float32.

        Args:
            positions: Where each key is to stand; where it stood by default. Windows are short,
                so a table for rotated keys wants positions spread over the context it is for.
        """
        places = self.positions if positions is None else positions
        return rotated(self.keys, self.layer, places)

    def post_queries(self) -> Array:
        """The queries as attention sees them, ``(M, H, G, D)`` float32."""
        M, H, G, D = self.queries.shape
        flat = rotated(self.queries.reshape(M, H * G, D), self.layer, self.query_positions)
        return flat.reshape(M, H, G, D)

    def split(self, held_out: int) -> tuple[LayerSamples, LayerSamples]:
        """Divide the tokens into all but the last ``held_out``, and these; queries go to both."""
        cut = len(self.keys) - held_out
        return self._part(slice(cut)), self._part(slice(cut, None))

    def thinned(self, limit: int) -> LayerSamples:
        """At most ``limit`` tokens, spread evenly; all queries."""
        count = len(self.keys)
        return self if count <= limit else self._part(np.arange(limit) * count // limit)

    def _part(self, rows: slice | Rows) -> LayerSamples:
        return attrs.evolve(
            self, keys=self.keys[rows], positions=self.positions[rows], values=self.values[rows]
        )


def rotated(rows: Array, layer: LayerSpec, positions: Sequence[int] | Rows) -> Array:
    """Rows ``(N, H, D)`` rotated to their positions; as they are where nothing rotates."""
    if layer.rotary is None or not len(rows):
        return rows
    places = [int(p) for p in positions]
    turned = layer.rotary.rotate(mx.array(rows).swapaxes(0, 1)[None], places)
    return np.array(turned[0].swapaxes(0, 1))
