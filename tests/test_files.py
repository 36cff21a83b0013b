from __future__ import annotations

from pathlib import Path

import pytest

from kvcompress.files import takes_files


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
