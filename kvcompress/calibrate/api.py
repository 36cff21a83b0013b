"""``kvcompress.calibrate``: from a model and a text to a calibration."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any, Final

import attrs

from kvcompress.calibrate.calibration import Calibration, Fit
from kvcompress.calibrate.capture import record
from kvcompress.calibrate.contract import Progress, fit_key
from kvcompress.calibrate.fitting import fit_layers, measure
from kvcompress.calibrate.samples import LayerSamples
from kvcompress.calibrate.windows import source_of, text_windows
from kvcompress.config.option import shown
from kvcompress.errors import BrokenPlugin, ConfigError
from kvcompress.text import Text

TOKENS: Final = 16384
PACKAGES: Final = ("kvcompress", "mlx", "mlx-lm", "numpy")
HELD_OUT: Final = 512
TOKENS_PER_CENTROID: Final = 16


def calibrate(
    model: Any,
    tokenizer: Any,
    text: str | PathLike[str] | Text,
    methods: Sequence[Any] = (),
    *,
    seed: int = 0,
    tokens: int = TOKENS,
    progress: Progress | None = None,
) -> Calibration:
    """Record a model once, and fit the tables of any number of methods to what was recorded.

    The same model, text, methods, tokens and seed give the same bytes.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer, as ``mlx_lm.load`` returns it.
        text: A text like what the model will read: the text itself, a built-in name, or the path
            of a file or a folder.
        methods: Methods, as ``get_method`` returns them; their classes; or their names, with
            options: ``"a2ats:sub_dim=4,8"``. One that fits no tables is served by the moments,
            which are always recorded.
        seed: For the sample and for the fits.
        tokens: How many tokens to read at most, spread evenly over the text.
        progress: Called with what is being done, how much is done, and out of how much.

    Raises:
        ConfigError: An argument is not legal, or the text is too short, too uniform or random.
        UnsupportedModel: No layer of the model can be compressed.
        KVCompressError: A method cannot be had, or fits something illegal.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"calibrate: seed must be an integer of at least 0 (got {shown(seed)})")
    chosen = configured(methods)
    source = source_of(text)
    windows = text_windows(tokenizer, source, tokens)
    start = time.perf_counter()
    samples = record(model, windows, seed=seed, progress=progress)
    seconds = time.perf_counter() - start
    read = sum(map(len, windows))
    calibration = Calibration(
        layers=tuple(one.layer for one in samples),
        recorded=tuple(one.moments for one in samples),
        fits=(),
        provenance=_provenance(model, source, read, seed),
        seconds=seconds,
    )
    # What is measured is not what was fitted to.
    held = min(HELD_OUT, len(samples[0].keys) // 16)
    halves = [one.split(held) for one in samples]
    fits = []
    for method in chosen:
        if hasattr(method, "fit"):
            _warn_if_few(method, len(halves[0][0].keys), read)
            fits.append(_fitted(method, calibration, halves, seed, progress))
    return attrs.evolve(calibration, fits=fits)


def configured(methods: Any) -> list[Any]:
    """Methods from instances, classes and names, or from one of these; each set of tables once.

    Raises:
        ConfigError: An item is none of these.
        KVCompressError: As ``get_method``.
    """
    from kvcompress.cli.options import parse_method
    from kvcompress.registry import get_method

    if isinstance(methods, str) or hasattr(methods, "bind"):
        methods = [methods]
    found = []
    for item in methods if isinstance(methods, Iterable) else [methods]:
        if isinstance(item, str):
            found += [get_method(spec.name, **spec.options) for spec in parse_method(item)]
        elif isinstance(item, type) and hasattr(item, "bind"):
            found.append(item())
        elif hasattr(item, "bind") and hasattr(item, "config"):
            found.append(item)
        else:
            raise ConfigError(
                f"calibrate: methods must be methods, their classes or their names "
                f"(got {shown(item)})"
            )
    return list({fit_key(method): method for method in found}.values())


def _fitted(
    method: Any,
    calibration: Calibration,
    halves: list[tuple[LayerSamples, LayerSamples]],
    seed: int,
    progress: Progress | None,
) -> Fit:
    """A method's tables with their report."""
    cls = type(method)
    if not attrs.has(cls) or "calibration" not in attrs.fields_dict(cls):
        raise BrokenPlugin(
            f"{method.name}: a method with fit() must be an attrs class that declares "
            f"calibration: Calibration | None = calibration_field()"
        )
    start = time.perf_counter()
    fit = fit_layers(method, [one for one, _ in halves], seed, progress)
    seconds = time.perf_counter() - start
    bound = attrs.evolve(method, calibration=attrs.evolve(calibration, fits=[fit]))
    report = {
        held.layer.index: {**fit.report[held.layer.index], **measure(bound, held)}
        for _, held in halves
    }
    return attrs.evolve(fit, report=report, seconds=seconds)


def _warn_if_few(method: Any, sampled: int, read: int) -> None:
    centroids = getattr(method, "centroids", 0)
    wanted = TOKENS_PER_CENTROID * centroids + HELD_OUT
    if sampled < TOKENS_PER_CENTROID * centroids:
        remedy = f"a longer text or tokens={wanted}" if read < wanted else "no more fit in memory"
        warnings.warn(
            f"{method.name}: {sampled} tokens are few for {centroids} centroids; for "
            f"{TOKENS_PER_CENTROID} tokens each, calibrate on at least {wanted} tokens "
            f"({read} were read: {remedy}), or ask for fewer centroids",
            stacklevel=3,
        )


def _provenance(model: Any, source: Text, read: int, seed: int) -> dict[str, Any]:
    """What the calibration was made of."""
    from kvcompress.models.load import fingerprint

    return {
        "model": {
            "architecture": f"{type(model).__module__}.{type(model).__qualname__}",
            "weights": fingerprint(model, {}),
        },
        # A path differs between machines; its last part and the digest do not.
        "text": {"name": Path(source.name).name, "sha256": source.sha256},
        "tokens": read,
        "seed": seed,
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
