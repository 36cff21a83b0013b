"""The tiny model for commands, and a call of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcompress import cli
from tests.compare.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return str(folder)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """Exit status, stdout and stderr of ``kvcompress WORDS``."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    out, err = capsys.readouterr()
    return caught.value.code, out, err
