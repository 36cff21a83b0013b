"""The hooks that a plugin may implement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from kvcompress.registry import Registrar

API_VERSION = 1
"""The version of the contract between kvcompress and its plugins."""

PROJECT = "kvcompress"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(historic=True)
def kvcompress_register(registry: Registrar) -> None:
    """Call ``registry.add(MethodInfo(...))`` once for each method that the plugin offers."""


@hookspec
def kvcompress_metrics() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Return metrics for comparisons by name."""


@hookspec
def kvcompress_workloads() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Return workloads for comparisons by name."""
