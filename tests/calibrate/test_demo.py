from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcompress.calibrate import demo
from kvcompress.calibrate.api import HELD_OUT, TOKENS_PER_CENTROID
from kvcompress.calibrate.demo import demo_calibration
from kvcompress.calibrate.file import to_bytes
from kvcompress.calibrate.recorder import SKIP
from kvcompress.calibrate.windows import WINDOW
from kvcompress.models.embedded import CACHE_VARIABLE, MANIFEST
from kvcompress.text import Text
from tests.calibrate.fakes import PROSE, ByteTokenizer, Peak, Plain, tiny_llama

RACE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from kvcompress.calibrate import demo
from kvcompress.calibrate.api import HELD_OUT, TOKENS_PER_CENTROID
from kvcompress.text import Text
from tests.calibrate.fakes import PROSE, ByteTokenizer, Peak, tiny_llama

log = Path(sys.argv[1])

def load():
    with log.open("a") as file:
        file.write("loaded ")
    return SimpleNamespace(model=tiny_llama(), tokenizer=ByteTokenizer())

demo.load_model = load
demo.ensure_demo_model = lambda: log.parent
demo.load_text = lambda name: Text(name, PROSE)
demo._sources = lambda methods: []  # which an editor may be changing between the two
print(demo.demo_calibration([Peak()], tokens=600).fingerprint)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibrations"


@pytest.fixture
def loaded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A tiny model in the embedded one's place; the list grows each time it is loaded."""
    times: list[int] = []

    def load() -> Any:
        times.append(1)
        return SimpleNamespace(model=tiny_llama(), tokenizer=ByteTokenizer())

    (tmp_path / MANIFEST).write_text("{}")
    monkeypatch.setattr(demo, "load_model", load)
    monkeypatch.setattr(demo, "ensure_demo_model", lambda: tmp_path)
    monkeypatch.setattr(demo, "load_text", lambda name: Text(name, PROSE))
    return times


def made(*methods: Any, tokens: int = 600, seed: int = 0) -> Any:
    return demo_calibration(methods, tokens=tokens, seed=seed)


def names(cache: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in cache.glob("*.safetensors"))


def test_it_is_made_once(loaded: list[int], cache: Path) -> None:
    first = made(Peak())
    again = made(Peak(window=3))
    assert to_bytes(first) == to_bytes(again)
    assert len(loaded) == 1
    assert names(cache) == ["peak"]


def test_only_what_is_missing_is_made(loaded: list[int], cache: Path) -> None:
    four = made(Peak(bits=4))
    both = made(Peak(bits=4), Peak(bits=8))
    assert len(loaded) == 2
    assert [fit.key.values["bits"] for fit in both.fits] == [4, 8]
    assert to_bytes(both.subset([Peak(bits=4)])) == to_bytes(four)
    made(Peak(bits=8))
    assert len(loaded) == 2
    assert names(cache) == ["peak", "peak"]


def test_methods_that_fit_nothing_get_the_moments(loaded: list[int], cache: Path) -> None:
    calibration = made(Plain())
    assert calibration.fits == ()
    made()
    assert len(loaded) == 1
    assert names(cache) == ["moments"]


def test_whatever_the_tables_depend_on_makes_another_file(
    loaded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(Peak())
    changes: list[Any] = [
        lambda: made(Peak(), tokens=500),
        lambda: made(Peak(), seed=1),
        lambda: (tmp_path / MANIFEST).write_text('{"other": "model"}') and made(Peak()),
        lambda: (
            monkeypatch.setattr(demo, "load_text", lambda n: Text(n, PROSE[9:])) or made(Peak())
        ),
        lambda: monkeypatch.setattr(demo, "version", lambda name: "9.9") or made(Peak()),
        lambda: monkeypatch.setattr(demo, "FORMAT", 9) or made(Peak()),
        lambda: monkeypatch.setattr(demo, "_CODE", ("fit",)) or made(Peak()),
    ]
    for count, change in enumerate(changes, start=2):
        change()
        assert len(loaded) == count


def test_the_code_of_the_method_counts() -> None:
    sources = set(demo._sources([Peak()]))
    assert Path(__file__).with_name("fakes.py") in sources
    assert Path(demo.__file__) in sources
    assert Path(demo.__file__).parents[1] / "fit" / "lloyd_max.py" in sources


@pytest.mark.parametrize("damage", [b"", b"half a file", None])
def test_a_damaged_file_is_made_anew(loaded: list[int], cache: Path, damage: bytes | None) -> None:
    good = to_bytes(made(Peak()))
    (file,) = cache.glob("*.safetensors")
    file.write_bytes(good[:-5] if damage is None else damage)
    assert to_bytes(made(Peak())) == good
    assert file.read_bytes() == good
    assert len(loaded) == 2


def test_two_processes_make_it_once_between_them(cache: Path, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    log = tmp_path / "log"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(log)],
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
            cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert log.read_text() == "loaded "


def test_there_are_tokens_enough_for_codebooks_of_8_bits() -> None:
    windows = -(-demo.TOKENS // WINDOW)
    sampled = demo.TOKENS - SKIP * windows
    held = min(HELD_OUT, sampled // 16)
    assert sampled - held >= 256 * TOKENS_PER_CENTROID
