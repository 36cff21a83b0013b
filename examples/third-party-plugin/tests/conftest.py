"""Hypothesis profiles: ``dev`` by default, ``ci`` and ``nightly`` by HYPOTHESIS_PROFILE."""

from __future__ import annotations

from kvcompress.testing import register_profiles

register_profiles()
