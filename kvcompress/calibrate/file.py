"""Calibrations on disk: one safetensors file with a JSON header.

The bytes follow from the calibration alone: names in one order, no time, no path. The header is
the file's single metadata entry, since the format keeps several in no particular order.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from os import PathLike
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvcompress.calibrate.calibration import Calibration, Fit
from kvcompress.calibrate.header import FORMAT, header_of, key_of, layer_of
from kvcompress.calibrate.samples import LayerMoments
from kvcompress.errors import CalibrationMismatch, ConfigError
from kvcompress.files import is_file, is_folder, takes_files, user_path
from kvcompress.layers import LayerSpec

METADATA_KEY: Final = "kvcompress_calibration"


def save_calibration(calibration: Calibration, path: str | PathLike[str]) -> None:
    """Write a calibration; another process never sees half a file.

    Raises:
        ConfigError: The file cannot be written there.
    """
    contents = to_bytes(calibration)
    target = user_path(path)
    scratch = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        try:
            scratch.write_bytes(contents)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"calibration: {target} cannot be written ({error.strerror})") from error


def check_writable(path: str | PathLike[str]) -> None:
    """Make sure that a calibration can be written, before it is made.

    Raises:
        ConfigError: The folder is missing or cannot be written, or the path is a folder.
    """
    target = user_path(path)
    if is_folder(target):
        raise ConfigError(f"calibration: {target} is a folder; name a file in it")
    if not takes_files(target.parent):
        raise ConfigError(f"calibration: the folder {target.parent} is missing or read-only")


def to_bytes(calibration: Calibration) -> bytes:
    """The contents of the file."""
    arrays = {name: np.array(a, order="C") for name, a in calibration.arrays()}
    return bytes(save(arrays, metadata={METADATA_KEY: header_of(calibration)}))


def load_calibration(path: str | PathLike[str]) -> Calibration:
    """Read a calibration.

    Raises:
        ConfigError: There is no such file, or it is no calibration or not a whole one.
        CalibrationMismatch: It was written in another format.
    """
    source = user_path(path)
    if not is_file(source):
        raise ConfigError(
            f"calibration: there is no file {source}; make one with: kvcompress calibrate"
        )
    try:
        with safe_open(source, framework="numpy") as file:
            header = json.loads((file.metadata() or {})[METADATA_KEY])
            if header["format"] != FORMAT:
                raise CalibrationMismatch(
                    f"calibration: {source} has format {header['format']}, this version reads "
                    f"{FORMAT}; make it again with: kvcompress calibrate"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        made = _from_parts(header, arrays)
        # Not in files of versions before it was recorded.
        if header.get("fingerprint", made.fingerprint) != made.fingerprint:
            raise ValueError("not what was written to it")
        return made
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"calibration: {source} is not a calibration file, or it is damaged "
            f"({type(error).__name__}: {error}); make it again with: kvcompress calibrate"
        ) from error


def _from_parts(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Calibration:
    layers = tuple(layer_of(fields) for fields in header["layers"])
    recorded = tuple(
        LayerMoments(
            tokens=counts["tokens"], queries=counts["queries"], **_moments_of(layer, arrays)
        )
        for layer, counts in zip(layers, header["counts"], strict=True)
    )
    fits = []
    for number, fields in enumerate(header["methods"]):
        tables: dict[int, dict[str, NDArray[Any]]] = {index: {} for index in fields["layers"]}
        for name, array in arrays.items():
            kind, _, rest = name.partition(f".{number}.")
            if kind == "tables":
                index, _, table = rest.partition(".")
                tables[int(index)][table] = array
        report = {int(index): row for index, row in fields["report"].items()}
        names = fields.get("head_tables")  # not in files of versions before it was recorded
        head_tables = None if names is None else tuple(str(name) for name in names)
        fits.append(Fit(key_of(fields), tables, report, head_tables=head_tables))
    return Calibration(
        layers=layers, recorded=recorded, fits=tuple(fits), provenance=header["provenance"]
    )


def _moments_of(layer: LayerSpec, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays of a layer's moments, by attribute; ``ValueError`` where they cannot be."""
    found = {}
    for name in (a.name for a in attrs.fields(LayerMoments)):
        if name in ("tokens", "queries"):
            continue
        dim = layer.value_dim if name.startswith("value") else layer.head_dim
        shape = (layer.kv_heads, dim, dim) if name.endswith("moment") else (layer.kv_heads, dim)
        array = arrays[f"moments.{layer.index}.{name}"]
        if array.shape != shape or array.dtype != np.float32 or not np.isfinite(array).all():
            raise ValueError(
                f"moments.{layer.index}.{name} must be finite float32 of shape {shape}"
            )
        found[name] = array
    return found
