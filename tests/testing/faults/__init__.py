"""Methods and caches that are wrong in one way each, of kinds that somebody once shipped."""

from tests.testing.faults import (  # noqa: F401
    attention,
    caches,
    claims,
    codes,
    models,
    options,
    processes,
    quality,
    stages,
)
from tests.testing.faults.plant import FAULTS

__all__ = ["FAULTS"]
