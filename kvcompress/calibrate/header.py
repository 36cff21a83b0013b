"""The JSON header of a calibration file: everything that is not an array."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvcompress.calibrate.contract import FitKey
from kvcompress.layers import LayerSpec, Rotary

if TYPE_CHECKING:
    from kvcompress.calibrate.calibration import Calibration

FORMAT: Final = 1


def header_of(calibration: Calibration) -> str:
    """Canonical JSON: the same for the same calibration, whatever the hash seed."""
    fields = {
        "format": FORMAT,
        "fingerprint": calibration.fingerprint,
        "layers": [layer_json(layer) for layer in calibration.layers],
        "counts": [{"tokens": m.tokens, "queries": m.queries} for m in calibration.recorded],
        "methods": [
            {
                "method": fit.key.method,
                "options": fit.key.values,
                "layers": sorted(fit.tables),
                "head_tables": None if fit.head_tables is None else list(fit.head_tables),
                "report": {str(index): dict(row) for index, row in fit.report.items()},
            }
            for fit in calibration.fits
        ],
        "provenance": dict(calibration.provenance),
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)


def layer_json(layer: LayerSpec) -> dict[str, Any]:
    """A layer as JSON values; an infinite wave length as null."""
    fields = attrs.asdict(layer)
    if layer.rotary is not None and layer.rotary.freqs is not None:
        freqs = [f if math.isfinite(f) else None for f in layer.rotary.freqs]
        fields["rotary"]["freqs"] = freqs
    return fields


def layer_of(fields: Mapping[str, Any]) -> LayerSpec:
    """The layer of :func:`layer_json`."""
    rest = dict(fields)
    rotary = rest.pop("rotary")
    if rotary is not None:
        freqs = rotary["freqs"]
        if freqs is not None:
            freqs = [math.inf if f is None else f for f in freqs]
        rotary = Rotary(**{**rotary, "freqs": freqs})
    return LayerSpec(rotary=rotary, **rest)


def key_of(fields: Mapping[str, Any]) -> FitKey:
    """The method and options of an entry under ``methods``."""
    return FitKey(str(fields["method"]), json.dumps(fields["options"], sort_keys=True))
