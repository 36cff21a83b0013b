"""Compressed caches for mlx-lm's models: what they hold, and how models are given them.

The names are imported when they are first used, since they bring MLX and mlx-lm with them. No
module here may bear a public name: importing it would put it in that name's place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcompress.cache.accounting import CacheReport, LayerReport, report
    from kvcompress.cache.attachment import Attachment, attach, detach, make_cache
    from kvcompress.cache.kvcache import CompressedKVCache

__all__ = [
    "Attachment",
    "CacheReport",
    "CompressedKVCache",
    "LayerReport",
    "attach",
    "detach",
    "make_cache",
    "report",
]

_MODULE_OF = {
    "Attachment": "attachment",
    "CacheReport": "accounting",
    "CompressedKVCache": "kvcache",
    "LayerReport": "accounting",
    "attach": "attachment",
    "detach": "attachment",
    "make_cache": "attachment",
    "report": "accounting",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
