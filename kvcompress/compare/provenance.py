"""Where a comparison's numbers come from."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any, Final

from kvcompress._version import __version__
from kvcompress.errors import ConfigError
from kvcompress.files import user_path

LIBRARIES: Final = ("mlx", "mlx-lm", "numpy")
"""Libraries whose version can change a number."""


def versions() -> dict[str, str]:
    """Versions of kvcompress, of the libraries under it and of Python."""
    return {
        "kvcompress": __version__,
        **{name: metadata.version(name) for name in LIBRARIES},
        "python": platform.python_version(),
    }


def distributions(methods: Iterable[str]) -> dict[str, str]:
    """The distribution and version that each method comes from.

    Args:
        methods: Names of methods, with or without their distribution before a ``:``.
    """
    from kvcompress.registry import list_methods

    offers = list_methods()
    found = {}
    for method in methods:
        distribution, _, name = method.rpartition(":")
        for offer in offers:
            if offer.name == name and distribution in ("", offer.distribution):
                found[method] = f"{offer.distribution} {offer.version}".strip()
    return found


def file_identity(path: str | None) -> dict[str, str] | None:
    """The path and the digest of a file, if there is one.

    Raises:
        ConfigError: It cannot be read.
    """
    if path is None:
        return None
    try:
        return {"path": path, "sha256": hashlib.sha256(user_path(path).read_bytes()).hexdigest()}
    except OSError as error:
        raise ConfigError(f"calibration: {path} cannot be read ({error.strerror})") from error


def machine() -> dict[str, Any]:
    """The system that the rows ran on."""
    return {"platform": platform.platform(), "machine": platform.machine()}
