from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcompress.errors import ConfigError
from kvcompress.text import sources
from kvcompress.text.sources import BUILTIN, CODE_CALIBRATION, CODE_EVAL, Text, encode, load_text


def test_a_text_carries_its_digest() -> None:
    text = Text("n", "naïve")
    assert text.sha256 == hashlib.sha256("naïve".encode()).hexdigest()
    assert "naïve" not in repr(text)


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_texts_are_long(name: str) -> None:
    text = load_text(name)
    assert text.name == name
    assert len(text.content) > 50_000


def test_built_in_texts_are_the_same_in_another_process() -> None:
    code = "from kvcompress.text import *; print(*[load_text(n).sha256 for n in BUILTIN])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.split() == [load_text(name).sha256 for name in BUILTIN]


def test_code_to_measure_on_is_other_code_than_code_to_calibrate_on() -> None:
    assert not set(CODE_EVAL) & set(CODE_CALIBRATION)
    assert "class ArgumentParser" in load_text("code-calibration").content
    assert "class ArgumentParser" not in load_text("code-eval").content
    for name in ("code-eval", "code-calibration"):
        compile(load_text(name).content.replace("from __future__", "#"), name, "exec")


def test_an_empty_name_is_not_the_folder_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "private.txt").write_text("not asked for")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'' is neither a file"):
        load_text("")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "book"
    path.write_text("Ein Käfer.\r\nEnd", encoding="utf-8", newline="")
    text = load_text(path)
    assert text == Text(str(path), "Ein Käfer.\nEnd")


def test_a_folder_is_read_in_order_without_hidden_or_foreign_files(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": "two",
        "a/z.md": "one",
        "c.py": "three",
        "a/picture.png": "png",
        ".venv/lib.py": "hidden",
        ".secret.txt": "hidden",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "folder.txt").mkdir()
    assert load_text(tmp_path).content == "one\n\ntwo\n\nthree"


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"'prose-evil' is neither .* prose-eval, prose-cal"):
        load_text("prose-evil")


@pytest.mark.parametrize("content", [b"", b" \n "])
def test_an_empty_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="holds no text"):
        load_text(path)
    with pytest.raises(ConfigError, match=r"\(\.md, \.py, \.txt files are read\)"):
        load_text(tmp_path)


def test_what_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ConfigError, match=r"latin\.txt is not UTF-8 \(invalid .* at 3\)"):
        load_text(path)


def test_a_module_without_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CODE_EVAL", ("sys",))
    with pytest.raises(ConfigError, match="without the source of 'sys'"):
        load_text("code-eval")


@pytest.mark.model
def test_encode_gives_long_texts_back_without_a_warning(
    demo: tuple[Any, Any], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    content = load_text("prose-eval").content
    ids = encode(demo[1], content)
    assert len(ids) > 8192
    assert demo[1].decode(ids) == content
    assert caplog.records == []
    assert capfd.readouterr().err == ""
