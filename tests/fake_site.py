"""A folder on ``sys.path`` with made-up distributions that offer plugins, as pip leaves them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvcompress import registry

HOOKS = """
from kvcompress import MethodInfo, hookimpl

@hookimpl
def kvcompress_register(registry):
    registry.add(MethodInfo("{name}", "A toy.", "{module}_code:Toy", paper="Toys, https://toys.org"))
"""

CODE = """
from typing import ClassVar
from attrs import frozen
from kvcompress import ConfigError, Method
from kvcompress.config import choice, illegal, integer

@frozen(kw_only=True)
class Toy(Method):
    name: ClassVar[str] = "{name}"
    bits: int = integer(4, low=1, high=8, help="Bits per value.")
    mode: str = choice("fast", ("fast", "good"), "How to code.")

    def check(self):
        if self.mode == "good" and self.bits < 2:
            raise illegal(self, "bits", "2 or more with mode='good'")

    def bind(self, layer):
        return ("codec", self.bits, layer)
"""


class Site:
    def __init__(self, root: Path) -> None:
        self.root = root

    def module(self, name: str, source: str) -> None:
        (self.root / f"{name}.py").write_text(source)
        registry.refresh()

    def distribution(
        self, name: str, methods: Mapping[str, str], *, group: str = "kvcompress.methods"
    ) -> None:
        lines = "\n".join(f"{key} = {value}" for key, value in methods.items())
        self.raw_distribution(name, f"[{group}]\n{lines}\n")

    def raw_distribution(self, name: str, entry_points: str) -> None:
        folder = self.root / f"{name.replace('-', '_')}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (folder / "entry_points.txt").write_text(entry_points)
        registry.refresh()

    def toy(self, name: str = "toy", *, module: str = "toy_plugin", dist: str = "toys") -> None:
        """Install a working method."""
        self.module(module, HOOKS.format(name=name, module=module))
        self.module(f"{module}_code", CODE.format(name=name))
        self.distribution(dist, {name: module})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    monkeypatch.undo()
    registry.refresh()
