"""A2ATS: un-rotated keys as query-aware vector codes, read through a windowed rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompress import MethodInfo, hookimpl

if TYPE_CHECKING:
    from kvcompress.registry import Registrar


@hookimpl
def kvcompress_register(registry: Registrar) -> None:
    """Offer ``a2ats``."""
    registry.add(
        MethodInfo(
            name="a2ats",
            summary="Query-aware vector codes of un-rotated keys, far positions by bands",
            target="kvcompress_a2ats.method:A2ATS",
            paper="A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position "
            "Embedding and Query-Aware Vector Quantization, https://arxiv.org/abs/2502.12665",
            needs_calibration=True,
        )
    )
