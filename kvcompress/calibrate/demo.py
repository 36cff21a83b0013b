"""Calibrations of the embedded model, made when they are first needed and kept."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Sequence
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from kvcompress.calibrate.api import PACKAGES, calibrate, configured
from kvcompress.calibrate.calibration import Calibration
from kvcompress.calibrate.contract import Progress, fit_key
from kvcompress.calibrate.file import load_calibration, save_calibration
from kvcompress.calibrate.header import FORMAT
from kvcompress.errors import CalibrationMismatch, ConfigError
from kvcompress.locks import one_process
from kvcompress.models import cache_folder, ensure_demo_model, load_model
from kvcompress.models.embedded import MANIFEST
from kvcompress.text import Text, load_text

TEXT: Final = "prose-calibration"
TOKENS: Final = 4608  # no more, for people wait for it; 16 fitted tokens a centroid of 8 bits

_CODE: Final = ("calibrate", "fit", "stages")  # of kvcompress: what tables come from


def demo_calibration(
    methods: Sequence[Any],
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """The tables of methods for the embedded model, fitted to the built-in prose.

    Each method's tables are kept in a file of their own in the cache folder, under a name that
    follows from everything they depend on, the code that fits them included. Those that are
    missing are made in one pass. Processes wait for each other rather than do the same twice.

    Args:
        methods: As for :func:`kvcompress.calibrate`; those that fit no tables need none.
        tokens: As for :func:`kvcompress.calibrate`.
        seed: As for :func:`kvcompress.calibrate`.
        progress: As for :func:`kvcompress.calibrate`.

    Raises:
        KVCompressError: As :func:`kvcompress.calibrate`, or the embedded model cannot be had.
    """
    sets = [[method] for method in configured(methods) if hasattr(method, "fit")] or [[]]
    text = load_text(TEXT)
    folder = cache_folder() / "calibrations"
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / _file_name(one, text, tokens, seed): one for one in sets}
    kept = {path: _kept(path) for path in files}
    if None in kept.values():
        with one_process(folder / "lock", "fits tables for the embedded model"):
            kept = {path: _kept(path) for path in files}  # another process may have made some
            missing = {path: one for path, one in files.items() if kept[path] is None}
            if missing:
                loaded = load_model()
                lacking = [method for one in missing.values() for method in one]
                made = calibrate(
                    loaded.model,
                    loaded.tokenizer,
                    text,
                    lacking,
                    tokens=tokens,
                    seed=seed,
                    progress=progress,
                )
                for path, one in missing.items():
                    kept[path] = made.subset(one)
                    save_calibration(made.subset(one), path)
    return reduce(Calibration.merged, [one for one in kept.values() if one is not None])


def _kept(path: Path) -> Calibration | None:
    """What is in the cache folder; a damaged file counts as none."""
    try:
        return load_calibration(path)
    except (ConfigError, CalibrationMismatch):
        return None


def _file_name(methods: Sequence[Any], text: Text, tokens: int, seed: int) -> str:
    manifest = (ensure_demo_model() / MANIFEST).read_bytes()
    depends_on = {
        "format": FORMAT,
        "model": hashlib.sha256(manifest).hexdigest(),
        "methods": [[fit_key(method).method, fit_key(method).options] for method in methods],
        "code": [_digest(path) for path in sorted(_sources(methods))],
        "text": text.sha256,
        "tokens": tokens,
        "seed": seed,
        "versions": [version(name) for name in PACKAGES],
    }
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    name = methods[0].name if methods else "moments"
    return f"{name}-{digest[:24]}.safetensors"


def _sources(methods: Sequence[Any]) -> Iterator[Path]:
    """The files whose code decides the tables."""
    core = Path(importlib.import_module("kvcompress").__file__ or "").parent
    for name in _CODE:
        yield from (core / name).glob("*.py")
    for method in methods:
        module = importlib.import_module(type(method).__module__)
        path = getattr(module, "__file__", None)
        if path is not None:  # not typed into an interpreter
            yield from Path(path).parent.glob("*.py") if module.__package__ else [Path(path)]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
