"""A prompt cache on disk: what it takes and how long it loads, beside mlx-lm's own at float16.

    python benchmarks/persistence.py --out docs/results/persistence.json

The embedded model reads a text once. What its layers kept is rounded to float16 and put into each
kind of cache, which is saved and loaded several times, all kinds in turn. Files are read from the
system's page cache, so reading from a disk adds to what is measured, the more the larger the file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.cache import (  # noqa: E402
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from results import deliver  # noqa: E402

import kvcompress as kv  # noqa: E402
from kvcompress.calibrate import demo_calibration  # noqa: E402
from kvcompress.compare.methods import method_of  # noqa: E402
from kvcompress.compare.provenance import machine, versions  # noqa: E402
from kvcompress.models import load_model  # noqa: E402
from kvcompress.text import encode, load_text  # noqa: E402

OURS = ("turboquant:bits=4", "turboquant:bits=2", "affine:bits=4")
CALIBRATED = ("vecinfer:bits=1",)
CHUNK = 512

Rows = list[tuple[mx.array, mx.array]]


@frozen
class Kind:
    """One kind of cache: its name, how it is saved, and how it is loaded."""

    name: str
    save: Callable[[Path], Any]
    load: Callable[[Path], list[Any]]


def read(model: Any, ids: list[int]) -> tuple[Rows, float]:
    """The keys and values of every layer, float16, and the seconds that reading took."""
    caches = make_prompt_cache(model)
    start = time.perf_counter()
    for place in range(0, len(ids), CHUNK):
        model(mx.array([ids[place : place + CHUNK]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    seconds = time.perf_counter() - start
    rows = [tuple(x.astype(mx.float16) for x in cache.keys_and_values()) for cache in caches]
    mx.eval(rows)
    return rows, seconds


def filled(cache: Any, rows: tuple[mx.array, mx.array]) -> Any:
    """A cache that was given the rows in chunks."""
    keys, values = rows
    for place in range(0, keys.shape[2], CHUNK):
        part = (slice(None), slice(None), slice(place, place + CHUNK))
        cache.update_and_fetch(keys[part], values[part])
        mx.eval(cache.state)
    return cache


def mlx_lm_kind(name: str, rows: Rows, bits: int | None = None) -> Kind:
    """mlx-lm's own cache, as it is or quantised."""
    caches = [filled(KVCache(), layer) for layer in rows]
    if bits:
        caches = [cache.to_quantized(group_size=64, bits=bits) for cache in caches]
    return Kind(
        name,
        lambda path: save_prompt_cache(str(path), caches),
        lambda path: load_prompt_cache(str(path)),
    )


def kind_of(spec: str, model: Any, rows: Rows, calibration: Any = None) -> Kind:
    """Our cache with a method."""
    method = method_of(spec, calibration)
    caches = [filled(c, layer) for c, layer in zip(kv.make_cache(method, model), rows, strict=True)]
    return Kind(
        spec,
        lambda path: kv.save_cache(path, caches),
        lambda path: kv.load_cache(path, model, calibration=calibration),
    )


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured(kinds: list[Kind], repeats: int) -> list[dict[str, Any]]:
    """Bytes and median times of each kind; the kinds take turns."""
    saving: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    loading: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats + 1):
            for place, kind in enumerate(kinds):
                path = Path(folder) / f"{place}.safetensors"
                saved = timed(lambda kind=kind, path=path: kind.save(path))
                loaded = timed(lambda kind=kind, path=path: evaluated(kind.load(path)))
                sizes[kind.name] = path.stat().st_size
                if turn:  # the first makes what is made once
                    saving[kind.name].append(saved)
                    loading[kind.name].append(loaded)
    rows = [
        {
            "cache": kind.name,
            "bytes": sizes[kind.name],
            "save_seconds": statistics.median(saving[kind.name]),
            "load_seconds": statistics.median(loading[kind.name]),
        }
        for kind in kinds
    ]
    return [{**row, **ratios(row, rows[0])} for row in rows]


def evaluated(caches: list[Any]) -> None:
    """Read what was loaded lazily."""
    flat: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])
    mx.eval([leaf for _, leaf in flat if isinstance(leaf, mx.array)])


def ratios(row: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, float]:
    """How many times less than the first row."""
    return {
        "times_smaller": first["bytes"] / row["bytes"],
        "times_faster_to_save": first["save_seconds"] / row["save_seconds"],
        "times_faster_to_load": first["load_seconds"] / row["load_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    loaded = load_model(dtype="float32")
    model = loaded.model
    text = load_text("prose-eval").content[: 8 * args.tokens]
    ids = encode(loaded.tokenizer, text)[: args.tokens]
    rows, seconds = read(model, ids)
    calibration = demo_calibration(CALIBRATED, tokens=2048)
    model.set_dtype(mx.float16)  # so that our caches, too, keep their exact tokens in float16
    kinds = [
        mlx_lm_kind("mlx-lm, float16", rows),
        mlx_lm_kind("mlx-lm, 8 bits", rows, 8),
        mlx_lm_kind("mlx-lm, 4 bits", rows, 4),
        *(kind_of(spec, model, rows) for spec in OURS),
        *(kind_of(spec, model, rows, calibration) for spec in CALIBRATED),
    ]
    result = {
        "tokens": len(ids),
        "read_seconds": seconds,
        "repeats": args.repeats,
        "rows": measured(kinds, args.repeats),
        "versions": versions(),
        "machine": machine(),
    }
    deliver(result, args.out)


if __name__ == "__main__":
    main()
