"""Calibrations fitted to synthetic tokens, for tests and nothing else."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np

from kvcompress.calibrate.contract import Tables, fit_key
from kvcompress.calibrate.fitting import fit_layers
from kvcompress.calibrate.samples import LayerMoments, LayerSamples
from kvcompress.calibrate.sums import ChannelSums, SecondMoment
from kvcompress.layers import LayerSpec
from kvcompress.testing.data import plain_keys
from kvcompress.testing.oracles import rope

_TOKENS = 1280  # five for each of 256 centroids
_SEED = 20  # not one that laws draw their first tokens from


def takes_calibration(cls: type[Any]) -> bool:
    """Whether a method's class has a ``calibration`` parameter."""
    return "calibration" in inspect.signature(cls).parameters


class SyntheticCalibration:
    """Stands in for a ``Calibration``: fits a method to made-up tokens of whatever layer it meets.

    Nobody should run a model with it, and nothing outside the kit makes one.
    """

    fingerprint = "synthetic tokens of kvcompress.testing"

    def __init__(self) -> None:
        self._tables: dict[Any, Tables] = {}

    def moments(self, layer: LayerSpec) -> LayerMoments:
        """The moments of the layer's made-up tokens."""
        return synthetic_samples(layer).moments

    def tables(self, method: Any, layer: LayerSpec) -> Tables:
        """A method's tables, by its own ``fit``; each set once."""
        key = (fit_key(method), layer)
        if key not in self._tables:
            fit = fit_layers(method, [synthetic_samples(layer)], _SEED)
            self._tables[key] = fit.tables[layer.index]
        return self._tables[key]


@cache
def synthetic_calibration() -> SyntheticCalibration:
    """The one of this process."""
    return SyntheticCalibration()


@cache
def synthetic_samples(layer: LayerSpec) -> LayerSamples:
    """Made-up tokens of a layer as a recorder would have sampled them, the same every time."""
    drawn = np.random.default_rng([_SEED, 3])
    N, H, G, D = _TOKENS, layer.kv_heads, layer.group, layer.head_dim
    keys = plain_keys(layer, N, seed=_SEED)[0]  # (H, N, D)
    values = drawn.standard_normal((H, N, layer.value_dim)) + 0.2
    queries = drawn.standard_normal((H, G * N, D))
    positions = np.arange(N)
    post_keys = rope(keys[None], range(N), layer.rotary)[0]
    post_queries = rope(queries.reshape(1, H * G, N, D), range(N), layer.rotary)
    key, post_key, value = (_channels(x) for x in (keys, post_keys, values))
    return LayerSamples(
        layer=layer,
        keys=keys.swapaxes(0, 1).astype(np.float32),
        positions=positions,
        values=values.swapaxes(0, 1).astype(np.float32),
        queries=queries.reshape(H, G, N, D).transpose(2, 0, 1, 3).astype(np.float32),
        query_positions=positions,
        moments=LayerMoments(
            tokens=N,
            queries=G * N,
            key_mean=key.mean,
            key_variance=key.variance,
            key_max=key.largest,
            post_key_mean=post_key.mean,
            post_key_variance=post_key.variance,
            post_key_max=post_key.largest,
            value_mean=value.mean,
            value_variance=value.variance,
            value_max=value.largest,
            query_moment=_moment(queries),
            post_query_moment=_moment(post_queries.reshape(H, G * N, D)),
        ),
    )


def _channels(x: Any) -> ChannelSums:
    sums = ChannelSums((x.shape[0], x.shape[2]))
    sums.add(x)
    return sums


def _moment(x: Any) -> Any:
    sums = SecondMoment((x.shape[0], x.shape[2]))
    sums.add(x)
    return sums.moment
