"""The method and the model that a command runs: how both are asked for, and the method made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvcompress.method import CompressionMethod


MethodWords = Annotated[
    str, typer.Option(metavar="METHOD[:OPTION=VALUE]...", help="The method, with options.")
]
ModelName = Annotated[
    str, typer.Option(help="smollm2-135m (fetched once), a folder, or a hub name.")
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        help="A calibration file, for a method that takes one; made where the embedded model "
        "lacks it."
    ),
]


def chosen_method(words: str, file: Path | None, model: str) -> CompressionMethod:
    """The method, with a calibration made for it where it lacks one for the embedded model."""
    from kvcompress.compare.calibrated import lacks_calibration
    from kvcompress.compare.methods import method_of
    from kvcompress.models.embedded import NAME as EMBEDDED

    chosen = method_of(words, None if file is None else str(file))
    if model != EMBEDDED or not lacks_calibration(chosen):
        return chosen

    from kvcompress.calibrate.demo import demo_calibration
    from kvcompress.cli.told import told

    with told() as progress:
        return method_of(words, demo_calibration([chosen], progress=progress))
