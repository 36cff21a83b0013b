from __future__ import annotations

from pathlib import Path

import pytest

from kvcompress.cache.persist import load_cache, read_metadata, save_cache
from kvcompress.calibrate.file import load_calibration
from kvcompress.calibrate.windows import source_of
from kvcompress.compare.provenance import file_identity
from kvcompress.errors import KVCompressError
from kvcompress.files import is_file, is_folder, takes_files, user_path
from kvcompress.models.load import model_source
from kvcompress.text import load_text
from tests.stand_ins import cache
from tests.zoo import tiny

NOWHERE = ("~nobody-of-that-name/a.safetensors", "a" * 5000 + ".safetensors")
"""Paths of which Python's own functions raise where they are only asked what is there."""


def test_a_folder_takes_files_and_keeps_none(tmp_path: Path) -> None:
    assert takes_files(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder_takes_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not takes_files(tmp_path / "file")
    assert not takes_files(tmp_path / "missing")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder of the kernel's")
def test_a_folder_that_only_looks_writable_takes_none() -> None:
    assert not takes_files(Path("/proc"))


def test_a_tilde_is_the_home_folder_of_users_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a"
    assert user_path(NOWHERE[0]) == Path(NOWHERE[0])


def test_what_is_there_is_told_of_any_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    paths = [tmp_path / "file", tmp_path, *map(Path, NOWHERE)]
    assert [is_file(path) for path in paths] == [True, False, False, False]
    assert [is_folder(path) for path in paths] == [False, True, False, False]


@pytest.mark.parametrize("path", NOWHERE, ids=["user", "long"])
def test_every_path_that_leads_nowhere_is_refused_in_words(path: str) -> None:
    readers = (load_calibration, load_text, model_source, file_identity, read_metadata)
    for read in readers:
        with pytest.raises(KVCompressError, match=path[:20]):
            read(path)
    with pytest.raises(KVCompressError, match="no such file"):
        load_cache(path, tiny("llama"))
    with pytest.raises(KVCompressError, match="cannot be written"):
        save_cache(path, [cache()])


def test_a_file_cannot_be_named_by_a_zero_byte() -> None:
    with pytest.raises(KVCompressError, match="cannot be written"):
        save_cache("a\0b.safetensors", [cache()])


def test_a_text_of_many_bytes_is_no_path() -> None:
    text = "漢字 " * 80
    assert source_of(text).content == text
