from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcompress import registry
from kvcompress.models import load_model
from kvcompress.models.embedded import CACHE_VARIABLE, MANIFEST
from tests.compare.strangers import CODE, ENTRY_POINTS, HOOKS
from tests.compare.tiny import save_tiny_model
from tests.fake_site import Site


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Installed strangers, for this process and for those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("site")
        patch.syspath_prepend(str(root))
        patch.setenv("PYTHONPATH", str(root), prepend=":")
        site = Site(root)
        site.module("stranger", HOOKS)
        site.module("stranger_code", CODE)
        site.distribution("strangers", ENTRY_POINTS)
        yield
    registry.refresh()


@pytest.fixture
def embedded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[int]]:
    """A tiny model in the embedded one's place: its name, and a list that grows as it is loaded."""
    from kvcompress.calibrate import demo
    from kvcompress.compare import runner

    times: list[int] = []

    def load() -> Any:
        times.append(1)
        return load_model(str(tiny_model))

    (tmp_path / MANIFEST).write_text("{}")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "load_model", load)
    monkeypatch.setattr(demo, "ensure_demo_model", lambda: tmp_path)
    monkeypatch.setattr(runner, "ensure_demo_model", lambda: tmp_path)
    monkeypatch.setattr(runner, "EMBEDDED", str(tiny_model))
    return str(tiny_model), times
