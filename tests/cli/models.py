"""The tiny model and a method for commands, and a call of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcompress import cli, registry
from tests.calibrate.fakes import PeakPlugin
from tests.compare.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return str(folder)


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
