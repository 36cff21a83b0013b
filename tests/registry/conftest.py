from __future__ import annotations

from tests.fake_site import site

__all__ = ["site"]
