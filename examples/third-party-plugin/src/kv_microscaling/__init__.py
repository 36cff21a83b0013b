"""Microscaling formats as a KV cache; light, because listing the methods imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompress import MethodInfo, hookimpl

if TYPE_CHECKING:
    from kvcompress.registry import Registrar


@hookimpl
def kvcompress_register(registry: Registrar) -> None:
    """Offer ``microscaling``."""
    registry.add(
        MethodInfo(
            name="microscaling",
            summary="Tiny floats that share a power of two in small groups of channels (MXFP4)",
            target="kv_microscaling.method:Microscaling",
            paper="Microscaling Data Formats for Deep Learning, https://arxiv.org/abs/2310.10537",
            capabilities=frozenset({"scale-equivariant"}),
        )
    )
