"""VecInfer: rotated keys, their channels made alike, by product quantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompress import MethodInfo, hookimpl

if TYPE_CHECKING:
    from kvcompress.registry import Registrar


@hookimpl
def kvcompress_register(registry: Registrar) -> None:
    """Offer ``vecinfer``."""
    registry.add(
        MethodInfo(
            name="vecinfer",
            summary="Vector codes of smoothed and rotated keys, 1 to 2 bits a channel",
            target="kvcompress_vecinfer.method:VecInfer",
            paper="VecInfer: Efficient LLM Inference with Low-Bit KV Cache via Outlier-Suppressed "
            "Vector Quantization, https://arxiv.org/abs/2510.06175",
            needs_calibration=True,
        )
    )
