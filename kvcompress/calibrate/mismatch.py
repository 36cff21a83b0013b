"""In what a calibration differs from what is asked of it, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from kvcompress.calibrate.contract import FitKey
from kvcompress.calibrate.sharded import shard_layer
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec, Rotary

_SIZES = ("kv_heads", "query_heads", "head_dim", "value_dim")


def layer_differences(known: LayerSpec, asked: LayerSpec) -> list[str]:
    """What differs, field by field; the dtype and rounding of the frequencies do not count."""
    out = [
        f"{name} {getattr(known, name)} in the calibration, {getattr(asked, name)} in the model"
        for name in _SIZES
        if getattr(known, name) != getattr(asked, name)
    ]
    if not _same_rotation(known.rotary, asked.rotary):
        out.append(
            f"rope {_rotation(known.rotary)} in the calibration, "
            f"{_rotation(asked.rotary)} in the model"
        )
    elif known.rotary_known != asked.rotary_known:
        out.append("whether the keys bear a rotation is known in only one of the two")
    return out


def remedy(known: LayerSpec, asked: LayerSpec) -> str:
    """What to do about a layer that differs."""
    ranks = known.query_heads // asked.query_heads
    with contextlib.suppress(ConfigError):
        if ranks > 1 and not layer_differences(shard_layer(known, 0, ranks), asked):
            return f"the model is one of {ranks} ranks: pass calibration.shard(rank, {ranks})"
    return "it was made for another model: calibrate this one"


def _same_rotation(a: Rotary | None, b: Rotary | None) -> bool:
    if a is None or b is None:
        return a is b
    # Computed frequencies differ in the last place between a CPU and a GPU.
    return (
        a.dims == b.dims
        and a.traditional == b.traditional
        and np.allclose(a.angles, b.angles, rtol=1e-4, atol=0.0)
    )


def _rotation(rotary: Rotary | None) -> str:
    if rotary is None:
        return "none"
    kind = "custom frequencies" if rotary.base is None else f"base {rotary.base:g}"
    pairing = ", traditional" if rotary.traditional else ""
    return f"({rotary.dims} channels, {kind}, scale {rotary.scale:g}{pairing})"


def nearest_fit(wanted: FitKey, held: Sequence[FitKey]) -> FitKey:
    """The one of ``held`` that differs from ``wanted`` in the fewest options."""
    return min(held, key=lambda key: len(_different(key, wanted)))


def option_differences(held: FitKey, wanted: FitKey) -> str:
    """``fitted for sub_dim=8, asked for sub_dim=4``."""
    names = _different(held, wanted)

    def values(key: FitKey) -> str:
        return ", ".join(f"{name}={key.values.get(name)}" for name in names)

    return f"fitted for {values(held)}, asked for {values(wanted)}"


def _different(a: FitKey, b: FitKey) -> list[str]:
    names = sorted({*a.values, *b.values})
    return [name for name in names if a.values.get(name) != b.values.get(name)]
