"""TurboQuant: rows are rotated at random and coded channel by channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompress import MethodInfo, hookimpl

if TYPE_CHECKING:
    from kvcompress.registry import Registrar


@hookimpl
def kvcompress_register(registry: Registrar) -> None:
    """Offer ``turboquant``."""
    registry.add(
        MethodInfo(
            name="turboquant",
            summary="Random rotation and scalar levels for every channel; needs no calibration",
            target="kvcompress_turboquant.method:TurboQuant",
            paper="TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate, "
            "https://arxiv.org/abs/2504.19874",
        )
    )
