"""A calibration: the moments of every layer, and the tables of every method fitted to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from os import PathLike
from typing import Any

import attrs
import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from kvcompress.calibrate.contract import FitKey, Tables, calibrate_command, fit_key
from kvcompress.calibrate.header import layer_json
from kvcompress.calibrate.mismatch import (
    layer_differences,
    nearest_fit,
    option_differences,
    remedy,
)
from kvcompress.calibrate.samples import LayerMoments
from kvcompress.errors import CalibrationMismatch, CalibrationRequired
from kvcompress.layers import LayerSpec


@frozen(eq=False)
class Fit:
    """A method's tables for every layer.

    Attributes:
        key: The method and the options that the tables depend on.
        tables: By the layer's index, then by name.
        report: By the layer's index: numbers on how well the tables fit.
        seconds: How long fitting took; neither compared nor saved.
        head_tables: Names of the tables whose leading axis is the KV heads, as the method declared
            them; ``None`` where it did not.
    """

    key: FitKey
    tables: Mapping[int, Tables]
    report: Mapping[int, Mapping[str, float]] = field(factory=dict)
    seconds: float = 0.0
    head_tables: tuple[str, ...] | None = None


def _in_order(fits: Iterable[Fit]) -> tuple[Fit, ...]:
    return tuple(sorted(fits, key=lambda fit: fit.key))


@frozen(eq=False, kw_only=True)
class Calibration:
    """What :func:`kvcompress.calibrate` made of a model and a text; immutable.

    Attributes:
        layers: The layers that were recorded.
        recorded: The moments of each of ``layers``.
        fits: The tables, one entry a method and set of options, in order.
        provenance: What it was made of, as JSON values: text, tokens, seed, model, versions.
        seconds: How long recording took; neither compared nor saved.
    """

    layers: tuple[LayerSpec, ...]
    recorded: tuple[LayerMoments, ...]
    fits: tuple[Fit, ...] = field(converter=_in_order)
    provenance: Mapping[str, Any]
    seconds: float = 0.0

    def __attrs_post_init__(self) -> None:
        for _, array in self.arrays():
            array.setflags(write=False)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the layers and every array; not of the provenance."""
        digest = hashlib.sha256()
        digest.update(json.dumps([layer_json(layer) for layer in self.layers]).encode())
        for name, array in self.arrays():
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(json.dumps([[f.key.method, f.key.options] for f in self.fits]).encode())
        return digest.hexdigest()

    def arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Every array under the name that the file gives it, in one order."""
        for layer, moments in zip(self.layers, self.recorded, strict=True):
            for attribute in attrs.fields(LayerMoments):
                value = getattr(moments, attribute.name)
                if isinstance(value, np.ndarray):
                    yield f"moments.{layer.index}.{attribute.name}", value
        for number, fit in enumerate(self.fits):
            for index in sorted(fit.tables):
                for name in sorted(fit.tables[index]):
                    yield f"tables.{number}.{index}.{name}", fit.tables[index][name]

    def moments(self, layer: LayerSpec) -> LayerMoments:
        """The moments of a layer.

        Raises:
            CalibrationMismatch: The layer is not among those recorded, or differs.
        """
        return self.recorded[self._place(layer, "calibration")]

    def tables(self, method: Any, layer: LayerSpec) -> Tables:
        """A method's tables for a layer, by name.

        Args:
            method: The configured method.
            layer: The layer it is bound to.

        Raises:
            CalibrationRequired: The calibration holds no tables of this method.
            CalibrationMismatch: Its tables are for other options, or for another layer.
        """
        self._place(layer, method.name)
        wanted = fit_key(method)
        ours = [fit for fit in self.fits if fit.key.method == method.name]
        for fit in ours:
            if fit.key == wanted:
                return fit.tables[layer.index]
        command = f"run: {calibrate_command(method)}"
        if not ours:
            held = ", ".join(sorted({fit.key.method for fit in self.fits})) or "none"
            raise CalibrationRequired(
                f"{method.name}: the calibration holds no tables for it (methods: {held}); "
                f"{command}"
            )
        raise CalibrationMismatch(
            f"{method.name}: the calibration was "
            f"{option_differences(nearest_fit(wanted, [fit.key for fit in ours]), wanted)}; "
            f"{command}"
        )

    def _place(self, layer: LayerSpec, who: str) -> int:
        places = {known.index: place for place, known in enumerate(self.layers)}
        if layer.index not in places:
            raise CalibrationMismatch(
                f"{who}: the calibration has no layer {layer.index} (it has "
                f"{', '.join(map(str, places))}); it was made for another model: calibrate this one"
            )
        place = places[layer.index]
        different = layer_differences(self.layers[place], layer)
        if different:
            raise CalibrationMismatch(
                f"{who}: layer {layer.index} is not the one that was calibrated: "
                f"{'; '.join(different)}; {remedy(self.layers[place], layer)}"
            )
        return place

    def shard(self, rank: int, size: int) -> Calibration:
        """The part for one rank of a model whose heads are spread over ``size`` ranks.

        See :func:`kvcompress.calibrate.sharded.sharded`.
        """
        from kvcompress.calibrate.sharded import sharded

        return sharded(self, rank, size)

    def subset(self, methods: list[Any]) -> Calibration:
        """The same with the tables of these methods alone."""
        keys = {fit_key(method) for method in methods}
        return attrs.evolve(self, fits=[fit for fit in self.fits if fit.key in keys])

    def merged(self, other: Calibration) -> Calibration:
        """The tables of both; ``other``'s where both have some.

        Raises:
            CalibrationMismatch: They were not made of the same model, text, tokens and seed.
        """
        if self.layers != other.layers or self.provenance != other.provenance:
            raise CalibrationMismatch(
                "calibration: only calibrations of the same model, text, tokens, seed and "
                "versions can be merged"
            )
        fits = {fit.key: fit for fit in (*self.fits, *other.fits)}
        return attrs.evolve(self, fits=list(fits.values()))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file; see :func:`kvcompress.calibrate.file.save_calibration`."""
        from kvcompress.calibrate.file import save_calibration

        save_calibration(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """Read a file; see :func:`kvcompress.calibrate.file.load_calibration`."""
        from kvcompress.calibrate.file import load_calibration

        return load_calibration(path)

    def __repr__(self) -> str:
        held = "; ".join(f"{fit.key.method} {fit.key.settings}".rstrip() for fit in self.fits)
        return f"Calibration({len(self.layers)} layers; {held or 'moments only'})"
