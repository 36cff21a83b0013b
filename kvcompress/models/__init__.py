"""Models to measure on: the embedded real one, local folders and hub names."""

from __future__ import annotations

from kvcompress.models.embedded import cache_folder, ensure_demo_model
from kvcompress.models.load import LoadedModel, load_model

__all__ = ["LoadedModel", "cache_folder", "ensure_demo_model", "load_model"]
