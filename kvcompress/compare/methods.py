"""From the words of a command line to configured methods."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvcompress.cli.options import MethodSpec, parse_method
from kvcompress.config import options_of
from kvcompress.errors import CalibrationRequired, ConfigError

if TYPE_CHECKING:
    from kvcompress.calibrate.calibration import Calibration
    from kvcompress.method import CompressionMethod


def method_of(
    words: str,
    calibration: str | Calibration | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> CompressionMethod:
    """The method that words stand for.

    Args:
        words: A method with its options, one value each.
        calibration: The path of a file, or what it holds; for a method that takes one and was
            not given one in ``words``.
        defaults: Options that hold unless ``words`` say otherwise, for a method that has them.

    Raises:
        ConfigError: The words stand for several configurations, or an option is not legal.
        KVCompressError: As :func:`kvcompress.get_method`.
    """
    from kvcompress.registry import get_method, method_class

    specs = parse_method(words)
    if len(specs) != 1:
        raise ConfigError(f"{words!r} stands for {len(specs)} configurations; one is wanted")
    [spec] = specs
    cls = method_class(spec.name)
    known = {option.name for option in options_of(cls)}
    options: dict[str, Any] = {name: defaults[name] for name in known.intersection(defaults)}
    options |= spec.options
    if calibration and "calibration" in inspect.signature(cls).parameters:
        options.setdefault("calibration", calibration)
    return get_method(spec.name, **options)


def config_of(method: CompressionMethod) -> dict[str, Any]:
    """The options of a method, and which calibration it was given."""
    given = getattr(getattr(method, "calibration", None), "fingerprint", None)
    return method.config() if given is None else {**method.config(), "calibration": given}


def expand(words: Iterable[str], calibration: str | None = None) -> list[MethodSpec]:
    """Read words for methods into one configuration a row, each once.

    Raises:
        ConfigError: An option is not legal, or the options do not fit together.
        KVCompressError: There is no such method, or it cannot be loaded.
    """
    specs: dict[str, MethodSpec] = {}
    for word in words:
        for spec in parse_method(word):
            specs.setdefault(spec.label, spec)
    for label in specs:
        with contextlib.suppress(CalibrationRequired):  # a row of its own says so
            method_of(label, calibration)
    return list(specs.values())
