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
    from kvcompress.hookspecs import hookimpl
    from kvcompress.method import CompressionMethod, Method, MethodInfo
    from kvcompress.registry import MethodStatus, get_method, list_methods

__all__ = [
    "BatchError",
    "BrokenPlugin",
    "CacheFileError",
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
    "detach",
    "get_method",
    "hookimpl",
    "list_methods",
    "make_cache",
    "report",
]

_MODULE_OF = {
    "CompressionMethod": "kvcompress.method",
    "Method": "kvcompress.method",
    "MethodInfo": "kvcompress.method",
    "MethodStatus": "kvcompress.registry",
    "attach": "kvcompress.cache",
    "detach": "kvcompress.cache",
    "get_method": "kvcompress.registry",
    "hookimpl": "kvcompress.hookspecs",
    "list_methods": "kvcompress.registry",
    "make_cache": "kvcompress.cache",
    "report": "kvcompress.cache",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
