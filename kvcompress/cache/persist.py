"""Save a model's caches to one file at their packed size, and go on from it later."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from safetensors import SafetensorError, safe_open

from kvcompress.cache.batch import CompressedBatchCache
from kvcompress.cache.binding import check_caches, check_model
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.nested import leaves, with_leaves
from kvcompress.cache.state import compact_state
from kvcompress.config.option import shown
from kvcompress.errors import CacheFileError, ConfigError, KVCompressError
from kvcompress.files import is_file, user_path

if TYPE_CHECKING:
    from kvcompress.method import CompressionMethod

FORMAT = "kvcompress-cache"
VERSION = 1
_SUFFIX = ".safetensors"


def save_cache(
    path: str | os.PathLike[str],
    caches: Sequence[Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write caches to a ``.safetensors`` file: codes packed, nothing for room to grow.

    The file is written beside its place and moved there when it is whole, so an older file
    survives a failure.

    Args:
        path: Where to, ending in ``.safetensors``.
        caches: What ``make_cache`` returned, plain caches among them.
        metadata: Strings to keep with it, such as the model's name.

    Raises:
        ConfigError: For another suffix, a folder that cannot be written to, metadata that are not
            strings, a batch, or no compressed cache.
    """
    target = _checked_path(path)
    check_caches("save_cache", caches)
    every = leaves(caches)
    if any(isinstance(cache, CompressedBatchCache) for cache in every):
        raise ConfigError(
            "save_cache: a batch is saved row by row: save_cache(path, [c.extract(row) for c in "
            "caches])"
        )
    if not any(isinstance(cache, CompressedKVCache) for cache in every):
        raise ConfigError("save_cache: caches must hold at least one compressed cache")
    notes = metadata or {}
    if not isinstance(notes, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in notes.items()
    ):
        raise ConfigError("save_cache: metadata must map strings to strings")
    arrays: dict[str, mx.array] = {}
    entries = [_describe(i, cache, arrays) for i, cache in enumerate(every)]
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "entries": json.dumps(entries, sort_keys=True),
        "model": _model_of(every),
        "metadata": json.dumps(dict(notes), sort_keys=True),
    }
    mx.eval(list(arrays.values()))
    _write(target, arrays, header)


def _model_of(caches: Sequence[Any]) -> str:
    """Fingerprint of the model that the caches were made for; empty where it is gone."""
    from kvcompress.models.load import fingerprint

    for cache in caches:
        lease = getattr(cache, "lease", None)
        model = None if lease is None else lease.model()
        if model is not None:
            return fingerprint(model, {})
    return ""


def _describe(index: int, cache: Any, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """One entry's header; its arrays go into ``arrays``."""
    compressed = isinstance(cache, CompressedKVCache)
    state = compact_state(cache) if compressed else cache.state
    leaves: dict[str, Any] = {}
    flat: list[tuple[str, Any]] = tree_flatten(state)  # type: ignore[assignment]
    for key, leaf in flat:
        if isinstance(leaf, mx.array):
            arrays[f"{index}.{key}"] = leaf
        else:
            leaves[key] = leaf
    return {"class": type(cache).__name__, "compressed": compressed, "leaves": leaves}


def _write(target: Path, arrays: dict[str, mx.array], header: dict[str, str]) -> None:
    prefix = f".{target.stem}-"
    try:
        handle, name = tempfile.mkstemp(suffix=_SUFFIX, prefix=prefix, dir=target.parent)
    except (OSError, ValueError) as error:  # no such folder, or no path at all
        why = getattr(error, "strerror", error)
        raise ConfigError(f"save_cache: {target} cannot be written ({why})") from error
    os.close(handle)
    try:
        mx.save_safetensors(name, arrays, header)
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):  # of Python, and of MLX
            raise ConfigError(f"save_cache: {target} cannot be written ({error})") from error
        raise


def load_cache(
    path: str | os.PathLike[str],
    model: Any,
    *,
    method: CompressionMethod | None = None,
    calibration: Any = None,
) -> list[Any]:
    """Caches that go on where :func:`save_cache` left off.

    Args:
        path: The file.
        model: The model that the caches are for.
        method: The method that wrote them, where its options hold arrays; otherwise it is made
            from the file.
        calibration: The calibration that the method was made with, or its path; not beside
            ``method``, which has it.

    Returns:
        One cache a layer, for ``prompt_cache=``.

    Raises:
        CacheFileError: The file is missing, truncated, foreign, of another version, or made
            with another model, method or calibration.
        ConfigError: The path, or the model, is none; or both method and calibration are given.
        CalibrationRequired: The method needs its calibration.
    """
    from kvcompress.cache import make_cache
    from kvcompress.models.load import fingerprint

    check_model("load_cache", model)
    if method is not None and calibration is not None:
        raise ConfigError(
            "load_cache: give method or calibration, not both: a method has its own calibration"
        )
    source = _checked_path(path)
    header = _header(source)
    if header["model"] not in ("", fingerprint(model, {})):
        raise CacheFileError(f"{source}: made with another model, or other weights of this one")
    entries, arrays = _read(source, header)
    method = method or _method_of(source, entries, calibration)
    caches = make_cache(method, model)
    every = leaves(caches)
    if len(every) != len(entries):
        raise CacheFileError(
            f"{source}: made for a model with {len(entries)} caches (this one has {len(every)})"
        )
    with _contents_of(source):
        pairs = enumerate(zip(every, entries, strict=True))
        restored = (_restored(i, cache, entry, arrays) for i, (cache, entry) in pairs)
        return with_leaves(caches, restored)


@contextlib.contextmanager
def _contents_of(source: Path) -> Iterator[None]:
    """Name the file in whatever its contents lead to, in mlx-lm's own caches too."""
    try:
        yield
    except CacheFileError as error:
        raise CacheFileError(f"{source}: {error}") from error
    except KVCompressError:
        raise
    except Exception as error:
        raise CacheFileError(f"{source}: damaged ({type(error).__name__}: {error})") from error


def _restored(index: int, cache: Any, entry: dict[str, Any], arrays: dict[str, mx.array]) -> Any:
    if entry["class"] != type(cache).__name__:
        raise CacheFileError(
            f"entry {index} is a {entry['class']}, but this model and method need a "
            f"{type(cache).__name__}"
        )
    own = f"{index}."
    leaves = list(entry["leaves"].items())
    leaves += [(k[len(own) :], v) for k, v in arrays.items() if k.startswith(own)]
    state = tree_unflatten(sorted(leaves, key=lambda leaf: [int(p) for p in leaf[0].split(".")]))
    if isinstance(cache, CompressedKVCache):
        cache.state = tuple(state)
        return cache
    return type(cache).from_state(state)


def _method_of(source: Path, entries: list[dict[str, Any]], calibration: Any) -> CompressionMethod:
    from kvcompress.registry import get_method

    with _contents_of(source):
        first = next(entry["leaves"]["0"] for entry in entries if entry["compressed"])
        identity = json.loads(first)["identity"]
        name, options = str(identity["method"]), {**identity["config"]}
    if calibration is not None:
        options["calibration"] = calibration
    try:
        method: CompressionMethod = get_method(name, **options)
    except ConfigError as error:
        raise CacheFileError(
            f"{source}: {name} cannot be made again from the file ({error}); give "
            f"it: load_cache(path, model, method=...)"
        ) from error
    return method


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The strings that were saved with a file.

    Raises:
        CacheFileError: Where the file is not a whole one of ours.
    """
    source = _checked_path(path)
    header = _header(source)
    with _contents_of(source):
        notes: dict[str, str] = json.loads(header["metadata"])
    return notes


def _header(source: Path) -> dict[str, str]:
    if not is_file(source):
        raise CacheFileError(f"{source}: no such file")
    try:
        with safe_open(source, framework="numpy") as file:  # checks that the file is whole
            header: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{source}: not a whole safetensors file ({error})") from error
    if header.get("format") != FORMAT:
        raise CacheFileError(
            f"{source}: not written by kvcompress.save_cache "
            f"(mlx_lm's load_prompt_cache reads mlx-lm's own files)"
        )
    if header.get("version") != str(VERSION):
        raise CacheFileError(
            f"{source}: has format version {header.get('version')}; this version reads {VERSION}"
        )
    missing = [name for name in ("entries", "model", "metadata") if name not in header]
    if missing:
        raise CacheFileError(f"{source}: damaged (its header has no {', '.join(missing)})")
    return header


def _read(source: Path, header: dict[str, str]) -> tuple[list[dict[str, Any]], dict[str, mx.array]]:
    """Header entries and evaluated arrays of a whole file."""
    with _contents_of(source):
        entries: list[dict[str, Any]] = json.loads(header["entries"])
        arrays: dict[str, mx.array] = mx.load(str(source))  # type: ignore[assignment]
        mx.eval(list(arrays.values()))
    return entries, arrays


def _checked_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"the cache file must be named by a path (got {shown(path)})")
    target = user_path(path)
    if target.suffix != _SUFFIX:
        raise ConfigError(f"the cache file must end in {_SUFFIX} (got {os.fspath(path)!r})")
    return target
