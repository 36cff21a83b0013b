"""CommVQ: un-rotated keys by additive codebooks that commute with rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompress import MethodInfo, hookimpl

if TYPE_CHECKING:
    from kvcompress.registry import Registrar


@hookimpl
def kvcompress_register(registry: Registrar) -> None:
    """Offer ``commvq``."""
    registry.add(
        MethodInfo(
            name="commvq",
            summary="Additive vector codes of whole un-rotated keys, 1 or 2 bits a channel",
            target="kvcompress_commvq.method:CommVQ",
            paper="CommVQ: Commutative Vector Quantization for KV Cache Compression, "
            "https://arxiv.org/abs/2506.18879",
            needs_calibration=True,
        )
    )
