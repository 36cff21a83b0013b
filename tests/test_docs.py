from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from kvcompress import list_methods


def generator() -> ModuleType:
    """``docs/generate.py`` as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_generated_parts_are_up_to_date() -> None:
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_methods_has_each_with_what_it_saves_and_needs() -> None:
    generate = generator()
    part = "<!-- generated: methods kvcompress -->\nstale\n<!-- end -->"
    lines = generate.filled(part).splitlines()
    rows = {cells[0]: cells[1:] for cells in map(cells_of, lines) if cells}
    names = {re.sub(r"[`\[\]]|\(.*\)", "", name) for name in rows if name not in ("method", "---")}
    assert names == {row.name for row in list_methods() if row.distribution == "kvcompress"}
    assert rows["[turboquant](turboquant.md)"][1:4] == ["4.25", "3.8x", "nothing"]
    assert rows["`affine`"][1:3] == ["4.50", "3.6x"]
    assert rows["`fp16`"][1:3] == ["as in the model", "-"]
    [a2ats] = (cells for name, cells in rows.items() if "a2ats" in name)
    assert a2ats[1:4] == ["1.00", "16.0x", "[calibrate](../how-to/calibrate.md)"]


def test_a_method_without_advice_is_missed() -> None:
    generate = generator()
    del generate.ADVICE["affine"]
    with pytest.raises(SystemExit, match="affine"):
        generate.methods("kvcompress")


def test_results_are_those_of_the_file_and_say_how_to_get_them() -> None:
    generate = generator()
    text = generate.filled("<!-- generated: results turboquant -->\n<!-- end -->")
    stored = json.loads((ROOT / "docs" / "results" / "turboquant.json").read_text())
    for row in stored["rows"]:
        assert f"`{row['method']}`" in text
    assert f"`{stored['provenance']['command']}`" in text


def test_the_table_of_families_counts_and_has_each() -> None:
    text = generator().filled("<!-- generated: families families -->\n<!-- end -->")
    stored = json.loads((ROOT / "docs" / "results" / "families.json").read_text())
    rows = [cells for cells in map(cells_of, text.splitlines()) if cells][2:]
    assert [name.strip("`") for name, *_ in rows] == [row["family"] for row in stored["rows"]]
    shares = [share for _, share, *_ in rows]
    refused, fails = shares.count("refused"), shares.count("does not run")
    assert f"Of {len(rows)} families" in text
    assert f"{len(rows) - refused - fails} are compressed" in text
    assert f"{refused} have no layer to compress" in text
    assert f"{fails} do not run here" in text
    assert ["`qwen3_next`", "2 of 4", "known"] in [row[:3] for row in rows]
    assert f"`{stored['command']}`" in text


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@cache
def defined_in(path: str) -> set[str]:
    """The tests that a file defines, laws of the conformance kit among them."""
    if not (ROOT / path).is_file():
        return set()
    nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return {name for name in functions if name.startswith("test_")}


def test_tests_are_found_where_they_are_and_nowhere_else() -> None:
    assert "test_tests_are_found_where_they_are_and_nowhere_else" in defined_in(
        "tests/test_docs.py"
    )
    assert "cells_of" not in defined_in("tests/test_docs.py")
    assert "test_trim_is_never_having_seen" in defined_in("kvcompress/testing/cache_laws.py")
    assert not defined_in("tests/no_such_file.py")


def test_each_failure_has_a_test() -> None:
    text = (ROOT / "docs" / "development" / "failures.md").read_text(encoding="utf-8")
    rows = [cells for cells in map(cells_of, text.splitlines()) if len(cells) == 2]
    failures = {what: tests for what, tests in rows if what not in ("failure", "---")}
    assert len(failures) == 35
    for what, tests in failures.items():
        named = [test.strip("`") for test in tests.split(", ")]
        assert named, what
        for test in named:
            assert re.fullmatch(r"(tests|kvcompress)/[\w/]+\.py::test_\w+", test), what


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_tests_and_modules_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:tests|benchmarks|docs)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
    for path, name in re.findall(r"`((?:tests|kvcompress)/[\w/]+\.py)::(\w+)", text):
        assert name in defined_in(path), f"{page.name}: {path}::{name}"
    for module in re.findall(r"`(kvcompress(?:\.[a-z_]+)+)", text):
        parts = module.split(".")
        found = any(
            (ROOT / "/".join(parts[:n])).with_suffix(".py").exists()
            or (ROOT / "/".join(parts[:n])).is_dir()
            for n in range(len(parts), 1, -1)
        )
        assert found, f"{page.name}: {module}"
