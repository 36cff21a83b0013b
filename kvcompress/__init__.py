"""Compressed KV caches for language models run with mlx-lm.

The public names are imported when they are first used, so ``import kvcompress`` is quick and
imports neither MLX nor mlx-lm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcompress._version import __version__
from kvcompress.errors import (
    BatchError,
    BrokenPlugin,
    CacheFileError,
    CalibrationMismatch,
    CalibrationRequired,
    ConfigError,
    DownloadError,
    IncompatiblePlugin,
    KVCompressError,
    PluginConflict,
    UnknownMethod,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from kvcompress.cache import attach, detach, make_cache, report
    from kvcompress.cache.persist import load_cache, save_cache
    from kvcompress.calibrate import Calibration, calibrate
    from kvcompress.hookspecs import hookimpl
    from kvcompress.method import CompressionMethod, Method, MethodInfo
    from kvcompress.registry import MethodStatus, get_method, list_methods

__all__ = [
    "BatchError",
    "BrokenPlugin",
    "CacheFileError",
    "Calibration",
    "CalibrationMismatch",
    "CalibrationRequired",
    "CompressionMethod",
    "ConfigError",
    "DownloadError",
    "IncompatiblePlugin",
    "KVCompressError",
    "Method",
    "MethodInfo",
    "MethodStatus",
    "PluginConflict",
    "UnknownMethod",
    "UnsupportedModel",
    "__version__",
    "attach",
    "calibrate",
    "detach",
    "get_method",
    "hookimpl",
    "list_methods",
    "load_cache",
    "make_cache",
    "report",
    "save_cache",
]

_MODULE_OF = {
    "Calibration": "kvcompress.calibrate",
    "CompressionMethod": "kvcompress.method",
    "Method": "kvcompress.method",
    "MethodInfo": "kvcompress.method",
    "MethodStatus": "kvcompress.registry",
    "attach": "kvcompress.cache",
    "calibrate": "kvcompress.calibrate.api",
    "detach": "kvcompress.cache",
    "get_method": "kvcompress.registry",
    "hookimpl": "kvcompress.hookspecs",
    "list_methods": "kvcompress.registry",
    "load_cache": "kvcompress.cache.persist",
    "make_cache": "kvcompress.cache",
    "report": "kvcompress.cache",
    "save_cache": "kvcompress.cache.persist",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
