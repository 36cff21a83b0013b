"""Every law that kvcompress has for a method."""

from __future__ import annotations

from kvcompress.testing import MethodConformance


class TestMicroscaling(MethodConformance):
    """The four lines."""

    method = "microscaling"
