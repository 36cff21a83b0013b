from __future__ import annotations

from kvcompress.testing import MethodConformance
from tests.testing.sound import Sound


class TestSound(MethodConformance):
    method = Sound
    capabilities = frozenset({"scale-equivariant"})
