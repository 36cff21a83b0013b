"""Calibration: one pass over a text records what every method's tables are fitted to.

A method that calibrates implements :class:`~kvcompress.calibrate.contract.Calibrated` and reads
its tables in ``bind`` through :func:`calibration_of`.

The package bears the name of the public function, so it can be called as one:
``kvcompress.calibrate(model, tokenizer, text)`` works whatever was imported first.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcompress.calibrate.api import calibrate
    from kvcompress.calibrate.calibration import Calibration
    from kvcompress.calibrate.contract import Calibrated, calibration_of
    from kvcompress.calibrate.demo import demo_calibration
    from kvcompress.calibrate.file import load_calibration
    from kvcompress.calibrate.samples import LayerMoments, LayerSamples

__all__ = [
    "Calibrated",
    "Calibration",
    "LayerMoments",
    "LayerSamples",
    "calibrate",
    "calibration_of",
    "demo_calibration",
    "load_calibration",
]

_MODULE_OF = {
    "Calibrated": "kvcompress.calibrate.contract",
    "Calibration": "kvcompress.calibrate.calibration",
    "LayerMoments": "kvcompress.calibrate.samples",
    "LayerSamples": "kvcompress.calibrate.samples",
    "calibrate": "kvcompress.calibrate.api",
    "calibration_of": "kvcompress.calibrate.contract",
    "demo_calibration": "kvcompress.calibrate.demo",
    "load_calibration": "kvcompress.calibrate.file",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Calibration:
        """Call :func:`kvcompress.calibrate.api.calibrate`."""
        from kvcompress.calibrate.api import calibrate

        return calibrate(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
