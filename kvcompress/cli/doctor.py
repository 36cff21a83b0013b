"""``kvcompress doctor``: what kvcompress runs on, and what becomes of a model's layers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from kvcompress.cli.chosen import MethodWords
from kvcompress.cli.fates import WORDS, Fate, alike, fates_of

METHOD: Final = "turboquant"
_WIDTH: Final = 16  # of what stands before each line
_SLOW: Final = (
    "the one in MLX's wheel, ten to thirty times slower than OpenBLAS in float32; to install that: "
    "sudo apt-get install libopenblas0-pthread"
)


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Look at the layers of this model, too: smollm2-135m (fetched once), a folder, or "
            "a hub name."
        ),
    ] = None,
    method: MethodWords = METHOD,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Tell what kvcompress runs on, and what would become of each layer of a model.

    Only shapes count: no weight of the model is read. Exits with status 1 if nothing of the model
    can be compressed.
    """
    from kvcompress.errors import ConfigError
    from kvcompress.openblas import prefer_openblas

    if model is None and method != METHOD:
        raise ConfigError("doctor: --method tells what becomes of a model's layers; give --model")
    fast = prefer_openblas()  # before anything imports mlx
    found: dict[str, Any] = {"environment": environment(fast), "plugins": plugin_faults()}
    if not as_json:
        for name, text in found["environment"].items():
            _print(name, text)
        for text in found["plugins"]:
            _print("plugin", text)
    fates: list[Fate] = []
    if model is not None:
        fates, note = _examined(model, method)
        found |= {"model": model, "method": method, "note": note, "layers": alike(fates)}
        if not as_json:
            _print_layers(found, fates)
    if as_json:
        import json

        print(json.dumps(found, indent=2))
    if model is not None and not any(fate.state == "compressed" for fate in fates):
        raise typer.Exit(1)


def environment(fast: bool) -> dict[str, str]:
    """Versions, device, BLAS, embedded model and methods, a line each.

    Args:
        fast: Whether OpenBLAS answers MLX.
    """
    from kvcompress.compare.provenance import machine, versions
    from kvcompress.registry import list_methods

    blas = "Accelerate" if sys.platform == "darwin" else _SLOW
    return {
        **versions(),
        "platform": machine()["platform"],
        "device": _device(),
        "BLAS": "OpenBLAS" if fast else blas,
        "embedded model": _embedded_model(),
        "methods": ", ".join(row.name for row in list_methods() if row.status == "ok"),
    }


def _device() -> str:
    try:
        import mlx.core as mx
    except ImportError as error:
        return (
            f"none: MLX cannot be imported ({error}); on Linux install kvcompress[cpu], or "
            "kvcompress[cuda12] or [cuda13] for a GPU"
        )
    if mx.default_device().type == mx.cpu:
        return "CPU"
    return "GPU (Metal)" if mx.metal.is_available() else "GPU (CUDA)"


def _embedded_model() -> str:
    from kvcompress.models.embedded import NAME, cache_folder, is_intact

    folder = cache_folder() / NAME
    if is_intact(folder):
        return f"{NAME}, in {folder}"
    if folder.exists():
        return f"{NAME}, damaged in {folder}: the next command that uses it builds it anew"
    return f"{NAME}, not fetched yet: the first command that uses it puts it into {folder}"


def plugin_faults() -> list[str]:
    """What is wrong with plugins, one text each; their code is imported to find out."""
    from kvcompress.errors import KVCompressError
    from kvcompress.registry import hooks, list_methods, method_class

    faults = []
    for row in list_methods():
        if row.status != "ok":
            faults.append(f"{row.status}: {row.detail}")
            continue
        try:
            method_class(f"{row.distribution}:{row.name}")
        except KVCompressError as error:
            faults.append(f"broken: {error}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        hooks()  # warns of add-ons that are broken
    return faults + [str(warning.message) for warning in caught]


def _examined(name: str, words: str) -> tuple[list[Fate], str]:
    from kvcompress.compare.methods import method_of
    from kvcompress.compare.skeleton import skeleton

    method_of(words)  # a mistake there shows before the model, which may take long
    return fates_of(words, skeleton(name))


def _print(name: str, text: str) -> None:
    print(f"{name:<{_WIDTH}}{text}")


def _print_layers(found: dict[str, Any], fates: Sequence[Fate]) -> None:
    count = len({fate.layer for fate in fates if fate.state == "compressed"})
    layers = len({fate.layer for fate in fates})
    print(f"\n{found['method']} on {found['model']}: {count} of {layers} layers compressed")
    for row in found["layers"]:
        _print(f"layers {row['layers']}", f"{WORDS[row['state']]}: {row['about']}")
    if found["note"]:
        _print("note", found["note"])
