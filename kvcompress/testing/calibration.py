"""Calibrations from synthetic tokens, declared as such, for methods that need one."""

from __future__ import annotations

import inspect
from typing import Any


def takes_calibration(cls: type[Any]) -> bool:
    """Whether a method's class has a ``calibration`` parameter."""
    return "calibration" in inspect.signature(cls).parameters


def synthetic_calibration() -> Any:
    return None
