"""Every method that is installed keeps every law."""

from __future__ import annotations

from kvcompress.registry import list_methods
from kvcompress.testing import suites

globals().update(suites(__name__))


def test_every_installed_method_works() -> None:
    broken = [f"{row.name}: {row.detail}" for row in list_methods() if row.status != "ok"]
    assert not broken
    assert list_methods()
