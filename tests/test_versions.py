"""The ranges of ``pyproject.toml``, and the files that hold the versions tested at their ends."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
NEWEST, OLDEST = "constraints.txt", "constraints-oldest.txt"


def pinned(file: str) -> dict[str, Version]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), f"{file} holds more than name==version"
    return {name.lower().replace("_", "-"): Version(version) for name, version in pins}


def claimed(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    lines = project["dependencies"] + [line for extra in extras for line in optional[extra]]
    return [Requirement(line) for line in lines]


def oldest(claim: Requirement) -> Version:
    [version] = (s.version for s in claim.specifier if s.operator == ">=")
    return Version(version)


def test_the_oldest_versions_that_are_tested_are_the_oldest_that_are_claimed() -> None:
    pins = pinned(OLDEST)
    for claim in claimed("cpu", "plot", "testing"):
        pin = pins.get(claim.name)
        assert pin == oldest(claim), f"{claim} is tested with {pin} ({OLDEST})"


def test_the_newest_versions_that_are_tested_are_within_what_is_claimed() -> None:
    pins = pinned(NEWEST)
    for claim in claimed("cpu", "plot", "testing", "dev"):
        assert pins.get(claim.name) in claim.specifier, f"{claim}: {pins.get(claim.name)}"


def test_the_installed_versions_are_within_what_is_claimed() -> None:
    for claim in claimed():
        installed = metadata.version(claim.name)
        assert installed in claim.specifier, f"{claim}: {installed} is installed"


def test_mlx_is_claimed_from_where_mlx_lm_takes_it() -> None:
    theirs = [Requirement(line) for line in metadata.requires("mlx-lm") or ()]
    for taken in (r for r in theirs if r.name == "mlx"):
        for claim in (c for c in claimed("cpu", "cuda12", "cuda13") if c.name == "mlx"):
            assert oldest(claim) in taken.specifier, f"mlx-lm needs {taken}, we claim {claim}"


@pytest.mark.parametrize("page", ["README.md", "docs/development/versions.md"])
def test_the_versions_that_are_said_to_be_tested_are(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in ("mlx-lm", "mlx"):
        [ends] = re.findall(rf"(?<![\w-]){name} (\d[\d.]*\d) to (\d[\d.]*\d)", text)
        assert ends == (str(pinned(OLDEST)[name]), str(pinned(NEWEST)[name])), f"{page}: {name}"
