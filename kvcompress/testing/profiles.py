"""Hypothesis profiles: how hard the laws are tried."""

from __future__ import annotations

import os

from hypothesis import settings

VARIABLE = "HYPOTHESIS_PROFILE"


def register_profiles() -> None:
    """Register ``dev``, ``ci`` and ``nightly``, and load the one that the environment names.

    Call it in a ``conftest.py``. ``dev`` is quick and the default; ``ci`` draws the same
    examples every time; ``nightly`` draws many.
    """
    settings.register_profile("dev", max_examples=20, deadline=None)
    settings.register_profile(
        "ci", max_examples=30, deadline=None, derandomize=True, print_blob=True
    )
    settings.register_profile("nightly", max_examples=500, deadline=None)
    settings.load_profile(os.environ.get(VARIABLE, "dev"))
