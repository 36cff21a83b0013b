"""The yardsticks: no compression, and MLX's own group quantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompress import MethodInfo, hookimpl

if TYPE_CHECKING:
    from kvcompress.registry import Registrar


@hookimpl
def kvcompress_register(registry: Registrar) -> None:
    """Offer ``fp16`` and ``affine``."""
    registry.add(
        MethodInfo(
            name="fp16",
            summary="No compression: the model's own caches, in the model's own precision",
            target="kvcompress_baseline.method:FP16",
            capabilities=frozenset({"plain"}),
        )
    )
    registry.add(
        MethodInfo(
            name="affine",
            summary="MLX's group quantisation: a scale and a bias for every 32 to 128 channels",
            target="kvcompress_baseline.method:Affine",
        )
    )
