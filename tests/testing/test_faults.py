"""The kit passes what is sound, and every law catches what it is there for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from kvcompress.testing import LawError, MethodConformance
from tests.testing.faults import FAULTS

# Nothing is made smaller: it is enough that an example is found.
settings.register_profile(
    "faults",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


@pytest.fixture(autouse=True)
def profile() -> Iterator[None]:
    before = settings.get_current_profile_name()
    settings.load_profile("faults")
    yield
    settings.load_profile(before)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    law, suite = FAULTS[name]
    with pytest.raises(LawError):
        getattr(suite(), law)()


def test_every_law_catches_a_planted_fault() -> None:
    laws = {name for name in dir(MethodConformance) if name.startswith("test_")}
    caught = {law for law, _ in FAULTS.values()}
    assert caught == laws - {"test_calibration_is_asked_for"}  # in test_registration.py
