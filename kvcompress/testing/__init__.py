"""The conformance kit: the laws that every compression method keeps, for its author to run.

Needs the extra ``kvcompress[testing]``. In a test file::

    from kvcompress.testing import MethodConformance

    class TestMine(MethodConformance):
        method = "mine"  # the registered name, or the class itself

That is the whole suite. How hard it tries is Hypothesis's profile, see
:mod:`kvcompress.testing.profiles`. What a method cannot do it declares in the ``capabilities`` of
its ``MethodInfo``, in the words of :mod:`kvcompress.testing.capabilities`.
"""

from __future__ import annotations

from kvcompress.testing.conformance import MethodConformance
from kvcompress.testing.law import LawError
from kvcompress.testing.machine import CacheMachine
from kvcompress.testing.profiles import register_profiles
from kvcompress.testing.suites import suites

__all__ = ["CacheMachine", "LawError", "MethodConformance", "register_profiles", "suites"]
