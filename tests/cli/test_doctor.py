from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcompress import __version__
from kvcompress.models import embedded
from tests.cli.models import call, tiny_model
from tests.fake_site import Site
from tests.zoo import fields_of

__all__ = ["tiny_model"]


def lines(out: str) -> dict[str, list[str]]:
    """The texts by the words that stand before them."""
    found: dict[str, list[str]] = {}
    for line in out.splitlines():
        found.setdefault(line[:16].strip(), []).append(line[16:])
    return found


def environment(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    code, out, err = call(capsys, "doctor", "--json")
    assert (code, err) == (0, "")
    found: dict[str, str] = json.loads(out)["environment"]
    return found


def test_what_kvcompress_runs_on_is_shown_without_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = call(capsys, "doctor")
    assert (code, err) == (0, "")
    shown = lines(out)
    assert shown["kvcompress"] == [__version__]
    assert shown["device"][0].split()[0] in ("CPU", "GPU")
    assert "turboquant" in shown["methods"][0].split(", ")
    assert "plugin" not in shown
    for name in ("mlx", "mlx-lm", "numpy", "python", "platform", "BLAS", "embedded model"):
        assert shown[name][0]


def test_a_model_s_layers_are_shown(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    words = ("--model", tiny_model, "--method", "turboquant:bits=3")
    code, out, err = call(capsys, "doctor", *words)
    assert (code, err) == (0, "")
    assert f"turboquant:bits=3 on {tiny_model}: 2 of 2 layers compressed\n" in out
    assert lines(out)["layers 0-1"] == [
        "compressed: 2 key heads of 32 channels, 3.50 bits a number"
    ]


def test_layers_that_bundle_caches_are_counted_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields_of("falcon_h1")))
    code, out, err = call(capsys, "doctor", "--model", str(tmp_path), "--method", "turboquant")
    assert (code, err) == (0, "")
    assert "4 of 4 layers compressed\n" in out
    left, compressed = lines(out)["layers 0-3"]
    assert left == (
        "left as the model makes it: ArraysCache: it holds a recurrent state, which does not grow"
    )
    assert compressed.startswith("compressed: 2 key heads of 16 channels")


def test_json_has_the_same(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    words = ("--model", tiny_model, "--method", "affine:skip_layers=0+1", "--json")
    code, out, _ = call(capsys, "doctor", *words)
    assert code == 0
    found = json.loads(out)
    assert found["environment"]["kvcompress"] == __version__
    assert [(row["layers"], row["state"]) for row in found["layers"]] == [
        ("0", "compressed"),
        ("1", "left"),
    ]


def test_a_method_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "doctor", "--method", "affine:bits=2")
    assert (code, out) == (2, "")
    assert err == "error: doctor: --method tells what becomes of a model's layers; give --model\n"


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_nothing_to_compress_is_status_1(
    capsys: pytest.CaptureFixture[str], tiny_model: str, form: tuple[str, ...]
) -> None:
    words = ("doctor", "--model", tiny_model, "--method", "affine:skip_layers=1", *form)
    code, out, _ = call(capsys, *words)
    assert code == 1
    assert "unsupported" in out
    assert "skip_layers must leave one" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--method", "nobody"), "no method named 'nobody'"),
        (("--method", "turboquant:bits=9"), "turboquant: bits must be"),
    ],
)
def test_mistakes_are_one_clear_line(
    capsys: pytest.CaptureFixture[str], tiny_model: str, words: tuple[str, ...], text: str
) -> None:
    code, _, err = call(capsys, "doctor", "--model", tiny_model, *words)
    assert code == 2
    assert text in err
    assert err.count("\n") == 1


def test_broken_plugins_of_all_kinds_are_told(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.distribution("gone", {"lost": "no_such_module"})
    site.toy()
    site.module("toy_plugin_code", "raise OSError('no library')")
    site.distribution("extras", {"measure": "no_such_addon"}, group="kvcompress.plugins")
    code, out, _ = call(capsys, "doctor")
    assert code == 0
    told = lines(out)["plugin"]
    assert len(told) == 3
    for text, part in (
        ("broken: lost:", "no_such_module"),
        ("broken: toy:", "OSError: no library"),
        ("plugin 'measure' of extras 1.2 is broken:", "no_such_addon"),
    ):
        assert any(line.startswith(text) and part in line for line in told)


def test_the_embedded_model_is_told_and_never_fetched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path))
    assert "not fetched yet" in environment(capsys)["embedded model"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / embedded.NAME).mkdir()
    assert "damaged" in environment(capsys)["embedded model"]
    monkeypatch.setattr(embedded, "is_intact", lambda folder: True)
    assert environment(capsys)["embedded model"].endswith(str(tmp_path / embedded.NAME))


def test_a_slow_blas_says_how_to_get_the_fast_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcompress.openblas.prefer_openblas", lambda: True)
    assert environment(capsys)["BLAS"] == "OpenBLAS"
    monkeypatch.setattr("kvcompress.openblas.prefer_openblas", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert "apt-get install libopenblas0-pthread" in environment(capsys)["BLAS"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert environment(capsys)["BLAS"] == "Accelerate"


def test_an_mlx_that_does_not_load_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked: Any = None
    monkeypatch.setitem(sys.modules, "mlx.core", blocked)
    assert "install kvcompress[cpu]" in environment(capsys)["device"]
