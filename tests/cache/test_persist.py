from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.cache import make_cache, persist
from kvcompress.cache.persist import load_cache, read_metadata, save_cache
from kvcompress.calibrate.api import calibrate
from kvcompress.errors import CacheFileError, CalibrationRequired, ConfigError, UnknownMethod
from kvcompress.registry import get_method
from tests.calibrate.fakes import ByteTokenizer
from tests.zoo import tiny

LETTERS = "".join(chr(1 + (i * i + i // 7) % 60) for i in range(4000))
PROMPT = mx.array([[(7 * i + i * i) % 61 for i in range(150)]])


def filled(model: Any, **options: Any) -> list[Any]:
    method = get_method("turboquant", **({"window": 16, "bits": 3} | options))
    caches = make_cache(method, model)
    mx.eval(model(PROMPT, cache=caches))
    return caches


def next_tokens(model: Any, caches: list[Any], count: int = 12) -> list[int]:
    out, token = [], mx.array([[1]])
    for _ in range(count):
        token = model(token, cache=caches)[:, -1].argmax(-1, keepdims=True)
        out.append(int(token.item()))
    return out


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_loaded_cache_goes_on_as_if_never_stopped(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    caches = filled(model)
    save_cache(tmp_path / "a.safetensors", caches, {"model": family})
    loaded = load_cache(tmp_path / "a.safetensors", model)
    assert read_metadata(tmp_path / "a.safetensors") == {"model": family}
    assert [type(c) for c in loaded] == [type(c) for c in caches]
    assert next_tokens(model, loaded) == next_tokens(model, caches)


def test_codes_take_their_packed_size_on_disk(tmp_path: Path) -> None:
    caches = filled(tiny("llama"))
    save_cache(tmp_path / "a.safetensors", caches)
    stored = sum(c.report.predicted_bytes for c in caches)
    assert stored < (tmp_path / "a.safetensors").stat().st_size < stored + 16_000


def test_a_fresh_process_goes_on(tmp_path: Path) -> None:
    model = tiny("llama")
    caches = filled(model)
    save_cache(tmp_path / "a.safetensors", caches)
    code = (
        "import sys; from tests.cache.test_persist import *; model = tiny('llama');"
        "print(next_tokens(model, load_cache(sys.argv[1], model)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.safetensors")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == str(next_tokens(model, caches))


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    model, whole = tiny("llama"), tmp_path / "a.safetensors"
    save_cache(whole, filled(model))
    content = whole.read_bytes()
    for size in np.linspace(0, len(content) - 1, 9).astype(int):
        (tmp_path / "b.safetensors").write_bytes(content[:size])
        with pytest.raises(CacheFileError, match=r"b\.safetensors"):
            load_cache(tmp_path / "b.safetensors", model)


def test_foreign_older_and_missing_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = tiny("llama"), tmp_path / "a.safetensors"
    with pytest.raises(CacheFileError, match="no such file"):
        load_cache(path, model)
    mx.save_safetensors(str(path), {"x": mx.zeros(3)})
    with pytest.raises(CacheFileError, match="not written by kvcompress"):
        load_cache(path, model)
    monkeypatch.setattr(persist, "VERSION", 0)
    save_cache(path, filled(model))
    monkeypatch.undo()
    with pytest.raises(CacheFileError, match="has format version 0"):
        load_cache(path, model)


def test_another_model_or_method_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", tiny("llama")
    save_cache(path, filled(model))
    with pytest.raises(CacheFileError, match="differs in"):
        load_cache(path, model, method=get_method("turboquant", bits=4, window=16))
    with pytest.raises(CacheFileError, match="another model"):
        load_cache(path, tiny("qwen2"))


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "a.safetensors", tiny("llama")
    save_cache(path, filled(model))
    before = path.read_bytes()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(persist.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_cache(path, filled(model, bits=2))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("first", [True, False])
def test_a_killed_writer_leaves_the_old_file(first: bool, tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", tiny("llama")
    if not first:
        save_cache(path, filled(model))
    before = path.read_bytes() if path.exists() else None
    code = (
        "import os, signal, sys; from tests.cache.test_persist import *\n"
        "def killed(*_): print('written', flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "persist.os.replace = killed\n"
        "save_cache(sys.argv[1], filled(tiny('llama'), bits=2))"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.stdout.strip(), done.returncode) == ("written", -9)
    left = [p for p in tmp_path.iterdir() if p != path]
    assert [p.name[:3] for p in left] == [".a-"]  # whole, but not in its place
    if before is None:
        assert not path.exists()
        with pytest.raises(CacheFileError, match="no such file"):
            load_cache(path, model)
    else:
        assert path.read_bytes() == before
        assert load_cache(path, model)
    save_cache(path, filled(model))
    assert load_cache(path, model)


def test_mlx_lms_own_file_is_named_and_left(tmp_path: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    path, model = tmp_path / "a.safetensors", tiny("llama")
    caches = make_prompt_cache(model)
    mx.eval(model(PROMPT, cache=caches))
    save_prompt_cache(str(path), caches)
    before = path.read_bytes()
    with pytest.raises(CacheFileError, match="load_prompt_cache reads mlx-lm's own"):
        load_cache(path, model)
    assert path.read_bytes() == before


def test_another_calibration_is_refused_by_the_files_name(tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", tiny("llama")
    made = [
        calibrate(model, ByteTokenizer(), text, ["turboquant"], tokens=512)
        for text in (LETTERS, LETTERS[::-1])
    ]
    save_cache(path, filled(model, centre="calibrated", calibration=made[0]))
    with pytest.raises(CacheFileError, match=r"a\.safetensors: turboquant: .*another calibration"):
        load_cache(path, model, calibration=made[1])
    with pytest.raises(CalibrationRequired, match="needs a calibration"):
        load_cache(path, model)
    assert load_cache(path, model, calibration=made[0])


def test_a_calibration_beside_a_method_is_refused(tmp_path: Path) -> None:
    caches = filled(tiny("llama"))
    save_cache(tmp_path / "a.safetensors", caches)
    with pytest.raises(ConfigError, match="load_cache: give method or calibration, not both"):
        load_cache(
            tmp_path / "a.safetensors",
            tiny("llama"),
            method=caches[0].method,
            calibration="other.safetensors",
        )


def test_a_method_that_is_not_there_is_named(tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", tiny("llama")
    save_cache(path, filled(model))

    def change(entries: Any) -> None:
        leaf = entries[0]["leaves"]["0"]
        entries[0]["leaves"]["0"] = leaf.replace('"method": "turboquant"', '"method": "gone"')

    damage(path, change)
    with pytest.raises(UnknownMethod, match="gone"):
        load_cache(path, model)


def test_coded_tokens_stay_coded_when_the_ones_after_them_are_taken_back(tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", tiny("llama")
    caches = filled(model)
    coded = caches[0].tokens_coded
    assert 60 < coded < 140
    for cache in caches:
        cache.trim(100)
    assert caches[0].offset == 50
    assert caches[0].tokens_coded == 46  # all but the sinks: what was exact after them is gone
    save_cache(path, caches)
    loaded = load_cache(path, model)
    assert loaded[0].tokens_coded == 46
    assert next_tokens(model, loaded) == next_tokens(model, caches)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    from mlx_lm.models.cache import KVCache

    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        save_cache(tmp_path / "a.npz", [])
    with pytest.raises(ConfigError, match="at least one compressed cache"):
        save_cache(tmp_path / "a.safetensors", [KVCache()])
    batch = [c.merge([c]) for c in filled(tiny("llama"))]
    with pytest.raises(ConfigError, match=r"a batch is saved row by row.*extract"):
        save_cache(tmp_path / "a.safetensors", batch)
    with pytest.raises(ConfigError, match="strings to strings"):
        save_cache(tmp_path / "a.safetensors", filled(tiny("llama")), {"n": 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="strings to strings"):
        save_cache(tmp_path / "a.safetensors", filled(tiny("llama")), ["n"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a path"):
        save_cache(None, filled(tiny("llama")))  # type: ignore[arg-type]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    caches = filled(tiny("llama"))
    (tmp_path / "folder.safetensors").mkdir()
    for place in (tmp_path / "none" / "a.safetensors", tmp_path / "folder.safetensors"):
        with pytest.raises(ConfigError, match=f"save_cache: {place} cannot be written"):
            save_cache(place, caches)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.safetensors"]


def damage(path: Path, change: Any) -> None:
    """Change the entries of a file."""
    arrays, header = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
    mx.eval(arrays)  # read before the file is written anew: mlx 0.32.2 truncates it first
    entries = json.loads(header["entries"])
    change(entries)
    mx.save_safetensors(str(path), arrays, header | {"entries": json.dumps(entries)})


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.clear(),
        lambda entries: entries.__setitem__(0, 1),
        lambda entries: entries[0].pop("class"),
        lambda entries: entries[0].pop("leaves"),
        lambda entries: entries[0].update(leaves={}),
        lambda entries: entries[0]["leaves"].update({"0": "x"}),
        lambda entries: entries[0]["leaves"].update({"0": "{}"}),
        lambda entries: entries[0]["leaves"].update({"x": "x"}),
        lambda entries: [entry.update(compressed=False) for entry in entries],
    ],
)
def test_damaged_entries_are_told_of(change: Any, tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", tiny("llama")
    save_cache(path, filled(model))
    damage(path, change)
    with pytest.raises(CacheFileError, match=r"a\.safetensors: damaged"):
        load_cache(path, model)


@pytest.mark.parametrize("name", ["entries", "model", "metadata"])
def test_a_header_without_one_of_its_parts_is_told_of(name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", tiny("llama")
    save_cache(path, filled(model))
    arrays, header = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
    mx.eval(arrays)  # read before the file is written anew: mlx 0.32.2 truncates it first
    del header[name]
    mx.save_safetensors(str(path), arrays, header)
    for read in (lambda: load_cache(path, model), lambda: read_metadata(path)):
        with pytest.raises(CacheFileError, match=f"its header has no {name}"):
            read()
