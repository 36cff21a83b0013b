"""Calibrations that are right in their sizes alone, for arithmetic on bytes."""

from __future__ import annotations

from typing import Any, Final

import attrs
import mlx.core as mx
import numpy as np

from kvcompress.cache.trace import trace
from kvcompress.calibrate.calibration import Calibration, Fit
from kvcompress.calibrate.contract import Tables, fit_key
from kvcompress.calibrate.samples import LayerSamples
from kvcompress.compare.fitted import fitted, samples_of
from kvcompress.layers import LayerSpec

TOKENS: Final = 128
"""Made-up tokens: enough for any method to fit tables to, which need not be any good."""


def sized_calibration(method: Any, model: Any) -> Calibration:
    """A calibration of a model's layers from made-up tokens; it must never meet a real one.

    One fit serves all layers that are alike; but no two layers get equal tables, because a codec
    keeps equal tables once.

    Args:
        method: A method that needs a calibration.
        model: An mlx-lm model; its weights may be missing.
    """
    layers = [slot.layer for slot in trace(model) if slot.layer is not None]
    samples = [made_up(layer) for layer in layers]
    alike = {_shape(one.layer): one for one in samples}
    fits = {shape: fitted(method, [one]).fits for shape, one in alike.items()}
    tables = {
        layer.index: _apart(fit.tables[alike[_shape(layer)].layer.index], place)
        for place, layer in enumerate(layers)
        for fit in fits[_shape(layer)]
    }
    return Calibration(
        layers=tuple(layers),
        recorded=tuple(one.moments for one in samples),
        fits=[Fit(fit_key(method), tables)] if tables else [],
        provenance={},
    )


def _shape(layer: LayerSpec) -> LayerSpec:
    return attrs.evolve(layer, index=0)


def _apart(tables: Tables, place: int) -> Tables:
    """Tables of the same sizes as no other place's."""
    factor = 1 + place / 1024
    return {
        name: (table * factor).astype(table.dtype) if table.dtype.kind == "f" else table
        for name, table in tables.items()
    }


def made_up(layer: LayerSpec) -> LayerSamples:
    """Samples of random tokens, other ones for each layer."""
    drawn = np.random.default_rng(layer.index)

    def rows(heads: int, dim: int) -> mx.array:
        return mx.array(drawn.standard_normal((1, heads, TOKENS, dim), dtype=np.float32))

    return samples_of(
        layer,
        rows(layer.kv_heads, layer.head_dim),
        rows(layer.kv_heads, layer.value_dim),
        rows(layer.query_heads, layer.head_dim),
    )
