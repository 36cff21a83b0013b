from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvcompress import cli
from tests.fake_site import Site


def test_methods_lists_what_works_and_why_the_rest_does_not(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    site.toy()
    site.module("bad", "raise ValueError('[bold]oops')")
    site.distribution("bads", {"bad": "bad"})
    with pytest.raises(SystemExit) as caught:
        cli.main(["methods"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "A toy." in out
    assert "https://toys.org" in out
    assert "ValueError: [bold]oops" in out


def test_methods_as_json(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.toy()
    with pytest.raises(SystemExit):
        cli.main(["methods", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {
        "name": "toy",
        "distribution": "toys",
        "version": "1.2",
        "status": "ok",
        "summary": "A toy.",
        "paper": "Toys, https://toys.org",
        "detail": "",
    } in rows


def test_methods_imports_neither_mlx_nor_mlx_lm() -> None:
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: print({'mlx', 'mlx_lm', 'numpy'} & set(sys.modules) or 'light'))\n"
        "from kvcompress.cli import main; main(['methods'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "light"
