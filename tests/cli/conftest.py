from __future__ import annotations

from fake_site import site

__all__ = ["site"]
