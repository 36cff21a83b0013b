"""The example of a third party's distribution: built, installed, found, tested and compared."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "third-party-plugin"
NAME = "microscaling"
COMMAND = ("-c", "from kvcompress.cli import main; main()")

Run = Callable[..., str]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, away from this repository and its settings."""
    copy = tmp_path_factory.mktemp("third-party") / "project"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return copy


@pytest.fixture(scope="module")
def run(project: Path) -> Run:
    """Runs ``python WORDS`` in the copy, with the example's wheel installed, for its stdout."""
    wheels, site = project.parent / "wheels", project.parent / "site"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    alone = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    _done([*pip, "wheel", "--no-deps", *alone, "--wheel-dir", str(wheels), "."], project)
    [wheel] = wheels.glob("*.whl")
    _done([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], project)
    return lambda *words: _done([sys.executable, *words], project, PYTHONPATH=str(site))


def _done(command: list[str], folder: Path, **variables: str) -> str:
    variables = {**os.environ, "HYPOTHESIS_PROFILE": "dev", "COLUMNS": "200", **variables}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_method_is_found_by_its_entry_point(run: Run) -> None:
    rows = json.loads(run(*COMMAND, "methods", "--json"))
    [row] = (row for row in rows if row["name"] == NAME)
    assert (row["status"], row["distribution"]) == ("ok", "kv-microscaling")
    script = f"import kvcompress; print(type(kvcompress.get_method({NAME!r}, bits=6)).__module__)"
    assert run("-c", script) == "kv_microscaling.method\n"


def test_it_passes_its_own_tests_and_the_conformance_kit(run: Run) -> None:
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", "tests")
    passed = int(out.rpartition(" passed")[0].split()[-1])
    assert passed > 60
    assert "failed" not in out


def test_it_is_compared_by_name(run: Run) -> None:
    words = ("--workload", "local_recency", "--method", f"{NAME}:bits=4,6", "--format", "json")
    rows = json.loads(run(*COMMAND, "compare", *words))["rows"]
    error = {(row["tokens"], row["method"]): row["measures"]["key_error"] for row in rows}
    assert len(error) == 4
    for tokens in (200, 400):
        assert error[tokens, f"{NAME}:bits=6"] < error[tokens, f"{NAME}:bits=4"] / 4


def test_it_imports_only_what_is_public(project: Path) -> None:
    modules: set[str] = set()
    for path in project.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                modules.update(f"{node.module}.{name.name}" for name in node.names)
            elif isinstance(node, ast.Import):
                modules.update(name.name for name in node.names)
    ours = {name for name in modules if name.startswith("kvcompress")}
    assert not [name for name in ours if any(part.startswith("_") for part in name.split("."))]
    inner = ("kvcompress.cache.", "kvcompress.cli.", "kvcompress.compare.")
    assert not [name for name in ours if name.startswith(inner)]
    assert not [name for name in modules if name.startswith("tests")]


def test_the_readme_shows_the_code_as_it_is(project: Path) -> None:
    readme = (project / "README.md").read_text(encoding="utf-8")
    files = {path.relative_to(project).as_posix(): path for path in project.rglob("*.py")}
    blocks = readme.split("```python\n# ")[1:]
    assert len(blocks) >= 4
    for block in blocks:
        name, _, code = block.partition("\n")
        whole = files[name].read_text(encoding="utf-8")
        for part in code.partition("```")[0].split("\n...\n"):
            assert part.strip("\n") in whole, f"{name}:\n{part}"
