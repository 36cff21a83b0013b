"""Tables fitted to given tokens, as a calibration holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvcompress.calibrate.calibration import Calibration
from kvcompress.calibrate.fitting import fit_layers
from kvcompress.calibrate.recorder import LayerRecorder
from kvcompress.calibrate.samples import LayerSamples
from kvcompress.layers import LayerSpec


def samples_of(
    layer: LayerSpec, keys: mx.array, values: mx.array, queries: mx.array, first_query: int = 0
) -> LayerSamples:
    """What calibrating would sample of one window, every token of it.

    Args:
        layer: The layer.
        keys: ``(1, H, N, D)`` rotated to positions 0 to ``N - 1``.
        values: ``(1, H, N, Dv)``.
        queries: ``(1, Hq, L, D)`` rotated to positions from ``first_query`` on.
        first_query: Position of the first query.
    """
    recorder = LayerRecorder(layer, skip=0)
    recorder.add_tokens(keys, values, 0, np.arange(keys.shape[2]))
    recorder.add_queries(
        queries, first_query, np.arange(first_query, first_query + queries.shape[2])
    )
    return recorder.finish()


def fitted(method: Any, samples: Sequence[LayerSamples], seed: int = 0) -> Calibration:
    """A calibration of these layers, with the method's tables if it fits any."""
    return Calibration(
        layers=tuple(one.layer for one in samples),
        recorded=tuple(one.moments for one in samples),
        fits=[fit_layers(method, list(samples), seed)] if hasattr(method, "fit") else [],
        provenance={},
    )
