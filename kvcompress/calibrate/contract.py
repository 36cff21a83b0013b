"""What a method implements to be calibrated, and how it gets at what was fitted for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.config import options_of
from kvcompress.errors import BrokenPlugin, CalibrationRequired

if TYPE_CHECKING:
    from kvcompress.calibrate.calibration import Calibration
    from kvcompress.calibrate.samples import LayerSamples

Tables = Mapping[str, NDArray[Any]]

Progress = Callable[[str, int, int], None]
"""Told of each step: what is being done, how much is done, out of how much."""

REPORT = "report."
"""What the names of numbers for the fit report begin with."""


@runtime_checkable
class Calibrated(Protocol):
    """A method with tables that are fitted to a layer's samples.

    It also declares ``calibration: Calibration | None = calibration_field()``. A method that
    fits many vectors to a codebook may have a property ``centroids``, the number of entries to
    which a token gives one vector; a text with too few tokens for it is warned of.

    A method whose codes of a KV head depend on no other head may have a class variable
    ``head_tables``: the names of the tables whose leading axis is the KV heads, or 1 where all
    heads share one. Its calibration can then be divided among the ranks of a tensor-parallel
    model; without it that is refused.

    Attributes:
        fit_options: Names of the options that the tables depend on; tables serve every
            configuration that agrees in these.
    """

    fit_options: ClassVar[tuple[str, ...]]

    def fit(self, samples: LayerSamples, *, seed: int) -> dict[str, np.ndarray]:
        """Return the method's tables for one layer; called for several layers at once, in threads.

        They are kept in the dtype they have: return codebooks as float16 where that will do, and
        measure distances to the rounded entries. Names that begin with ``report.`` are single
        numbers for the fit report: ``report.dead_centroids``, say.

        Args:
            samples: The layer's; everything the tables may depend on but the options and seed.
            seed: For whatever is drawn at random: a number of its own for each method and layer.
        """
        ...


@frozen(order=True)
class FitKey:
    """A method's name and the options its tables depend on.

    Attributes:
        method: The name.
        options: The options by name, as canonical JSON.
    """

    method: str
    options: str

    @property
    def values(self) -> dict[str, Any]:
        """The options by name."""
        values: dict[str, Any] = json.loads(self.options)
        return values

    @property
    def settings(self) -> str:
        """The options as a reader is shown them: ``bits=8, sub_dim=4``."""
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


def fit_key(method: Any) -> FitKey:
    """Which tables are a method's.

    Raises:
        BrokenPlugin: ``fit_options`` names something that is no option.
    """
    config = method.config()
    names = sorted(getattr(method, "fit_options", ()))
    unknown = [name for name in names if name not in config]
    if unknown:
        raise BrokenPlugin(f"{method.name}: fit_options names {unknown[0]!r}, which is no option")
    return FitKey(method.name, json.dumps({name: config[name] for name in names}, sort_keys=True))


def calibrate_command(method: Any) -> str:
    """The command that makes a calibration for a method as it is configured."""
    words = [method.name]
    options = {option.name: option for option in options_of(type(method))}
    for name, value in fit_key(method).values.items():
        if name not in options or value != options[name].encode(options[name].default):
            words.append(
                f"{name}={'+'.join(map(str, value)) if isinstance(value, list) else value}"
            )
    spec = ":".join(words)
    return f"kvcompress calibrate --method {spec} --model MODEL --out calibration.safetensors"


def calibration_of(method: Any) -> Calibration:
    """The calibration that a method was given.

    Raises:
        CalibrationRequired: It was given none.
    """
    calibration: Calibration | None = method.calibration
    if calibration is None:
        raise CalibrationRequired(
            f"{method.name}: needs a calibration and was given none; run: "
            f"{calibrate_command(method)}, then pass calibration='calibration.safetensors' "
            "(--calibration calibration.safetensors on the command line)"
        )
    return calibration
