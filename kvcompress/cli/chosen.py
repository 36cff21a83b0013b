"""The method that a command runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcompress.method import CompressionMethod


def chosen_method(words: str, path: str | None, model: str) -> CompressionMethod:
    """The method, with a calibration made for it where it lacks one for the embedded model."""
    from kvcompress.compare.calibrated import lacks_calibration
    from kvcompress.compare.methods import method_of
    from kvcompress.models.embedded import NAME as EMBEDDED

    chosen = method_of(words, path)
    if model != EMBEDDED or not lacks_calibration(chosen):
        return chosen

    from kvcompress.calibrate.demo import demo_calibration
    from kvcompress.cli.told import told

    with told() as progress:
        return method_of(words, demo_calibration([chosen], progress=progress))
