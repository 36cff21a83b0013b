"""The tiny model and a method for commands, and a call of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcompress import cli, registry
from kvcompress.calibrate import demo
from kvcompress.models import embedded, load_model
from tests.calibrate.fakes import PeakPlugin
from tests.compare.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return str(folder)


@pytest.fixture
def tiny_is_embedded(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model stands in for the embedded one, with an empty cache folder."""
    (tmp_path / embedded.MANIFEST).write_text("{}")
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(embedded, "NAME", tiny_model)
    monkeypatch.setattr(demo, "load_model", lambda: load_model(tiny_model))
    monkeypatch.setattr(demo, "ensure_demo_model", lambda: tmp_path)


@pytest.fixture
def peak() -> Iterator[None]:
    """The method ``peak``, which calibrates, is registered."""
    plugin = PeakPlugin()
    registry.register(plugin)
    yield
    registry.unregister(plugin)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """Exit status, stdout and stderr of ``kvcompress WORDS``."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    out, err = capsys.readouterr()
    return caught.value.code, out, err
