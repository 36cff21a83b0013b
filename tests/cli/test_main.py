from __future__ import annotations

import subprocess
import sys

import pytest

from kvcompress import UnknownMethod, __version__, cli


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"{__version__}\n", "")


def test_python_runs_the_package() -> None:
    command = [sys.executable, "-m", "kvcompress", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{__version__}\n"


def test_an_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "inspect", "nobody")
    assert (code, out) == (2, "")
    assert err.startswith("error: no method named 'nobody'")
    assert err.count("\n") == 1


def test_debug_lets_the_traceback_pass() -> None:
    with pytest.raises(UnknownMethod):
        cli.main(["--debug", "inspect", "nobody"])


def test_a_mistyped_command_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "method")
    assert code == 2
    assert "No such command 'method'" in err


def test_the_help_names_every_command_and_imports_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "later", ("no_such_module:later", "Do it later."))
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for name, (_, line) in cli.COMMANDS.items():
        assert name in out
        assert line in out


def test_only_the_command_asked_for_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "later", ("no_such_module:later", "Do it later."))
    assert call(capsys, "methods", "--json")[0] == 0
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["later"])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_in_the_table_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    assert f"kvcompress {name}" in out


def test_the_words_of_the_process_are_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvcompress", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == f"{__version__}\n"
