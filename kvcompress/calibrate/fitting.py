"""Fitting one method to all layers, and measuring what came of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from kvcompress.calibrate.calibration import Fit
from kvcompress.calibrate.contract import REPORT, FitKey, Progress, fit_key
from kvcompress.calibrate.samples import LayerSamples
from kvcompress.errors import BrokenPlugin


def fit_layers(
    method: Any, samples: list[LayerSamples], seed: int, progress: Progress | None = None
) -> Fit:
    """Fit a method to every layer, each with a seed of its own.

    Raises:
        BrokenPlugin: The method returns something that is no table.
    """
    key = fit_key(method)
    step = f"fitting {key.method} {key.settings}".rstrip()
    tables, report = {}, {}
    # NumPy lets go of the interpreter while it computes: layers are fitted side by side, and
    # products too small to be divided are left to one core each.
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        fits = pool.map(
            lambda one: method.fit(one, seed=seed_of(key, one.layer.index, seed)), samples
        )
        for done, (one, fitted) in enumerate(zip(samples, fits, strict=True)):
            if progress:
                progress(step, done, len(samples))
            index = one.layer.index
            where = f"{method.name}: fit of layer {index}"
            if not isinstance(fitted, Mapping):
                raise BrokenPlugin(f"{where} must return a dict (got {type(fitted).__name__})")
            tables[index] = {
                name: _table(where, name, table)
                for name, table in fitted.items()
                if not name.startswith(REPORT)
            }
            report[index] = {
                name.removeprefix(REPORT): rounded(number)
                for name, number in fitted.items()
                if name.startswith(REPORT)
            }
    if progress:
        progress(step, len(samples), len(samples))
    return Fit(key, tables, report, head_tables=_head_tables(method))


def _head_tables(method: Any) -> tuple[str, ...] | None:
    names = getattr(method, "head_tables", None)
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise BrokenPlugin(f"{method.name}: head_tables must be a tuple of names (got {names!r})")
    return tuple(names)


def seed_of(key: FitKey, layer: int, seed: int) -> int:
    """The seed of one method and layer: 32 bits that depend on nothing else."""
    text = f"{seed} {layer} {key.method} {key.options}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _table(where: str, name: str, table: Any) -> NDArray[Any]:
    if not isinstance(table, np.ndarray) or table.dtype.kind not in "fiu" or table.ndim == 0:
        raise BrokenPlugin(f"{where}: {name} must be a NumPy array of numbers (got {table!r:.60})")
    with np.errstate(over="ignore"):
        kept = table.astype(np.float32) if table.dtype == np.float64 else np.array(table)
    if not np.isfinite(kept).all():
        raise BrokenPlugin(f"{where}: {name} is not finite in {kept.dtype}")
    return kept


def measure(method: Any, held: LayerSamples) -> dict[str, float]:
    """How far off tokens are that a layer's tables were not fitted to.

    Args:
        method: The method with its calibration.
        held: The tokens.

    Returns:
        ``key_spread`` and ``value_spread``: mean squared distance, a head and token, to the
        head's mean, which is what coding by the mean alone would cost; ``key_error`` and
        ``value_error``: mean squared distance to what the codes stand for.
    """
    layer, moments = held.layer, held.moments
    codec = method.bind(layer)
    post = held.post_keys()
    keys = mx.array(post).swapaxes(0, 1)[None].astype(layer.mx_dtype)
    values = mx.array(held.values).swapaxes(0, 1)[None].astype(layer.mx_dtype)
    places = [int(p) for p in held.positions]
    decoded = codec.decode(codec.encode(keys, values, places), places)
    key_rows, value_rows = (
        np.array(x[0].astype(mx.float32)).swapaxes(0, 1).astype(np.float64) for x in decoded
    )
    return {
        "key_spread": rounded(_square(held.keys - moments.key_mean)),
        "key_error": rounded(_square(post - key_rows)),
        "value_spread": rounded(_square(held.values - moments.value_mean)),
        "value_error": rounded(_square(held.values - value_rows)),
    }


def _square(x: NDArray[Any]) -> float:
    """Mean over tokens and heads of the squared length."""
    return float(np.square(x.astype(np.float64)).sum(axis=-1).mean()) if x.size else 0.0


def rounded(number: Any) -> float:
    """Six digits, which round-off does not reach."""
    return float(f"{float(number):.6g}")
