"""Tiny random models of every family that mlx-lm ships, for tests that hold for all of them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_map
from packaging.version import Version

from tests.zoo.common import COMMON
from tests.zoo.dense import DENSE
from tests.zoo.experts import EXPERTS
from tests.zoo.hybrid import HYBRID
from tests.zoo.latent import LATENT_FAMILIES
from tests.zoo.windowed import WINDOWED

# Families that mlx-lm has, or can run, from a later version on than the oldest that is supported.
# Before, phi3small writes outside of its logits, which ends the process.
LATER: dict[str, str] = {
    "muse_spark": "0.32.2",
    "phi3small": "0.32.1",
    "prism_hadamard_qwen35": "0.32.1",
}


def _here(family: str) -> bool:
    return Version(version("mlx-lm")) >= Version(LATER.get(family, "0"))


# What a family needs beyond the common fields.
FIELDS: dict[str, dict[str, Any]] = {
    family: fields
    for kind in (DENSE, EXPERTS, WINDOWED, HYBRID, LATENT_FAMILIES)
    for family, fields in kind.items()
    if _here(family)
}

# Families that fail on a CPU with their own caches: what the error says, and why.
FAILING: dict[str, tuple[str, str]] = {
    "bitnet": ("No Metal back-end", "its weights are read by a kernel for Metal"),
    "muse_spark": ("No Metal back-end", "its norms and rotations are kernels for Metal"),
    "olmo": ("inplace addition", "it adds the name of a mask to its scores (mlx-lm 0.32)"),
}
FAILING = {family: why for family, why in FAILING.items() if _here(family)}

FAMILIES: tuple[str, ...] = tuple(sorted(FIELDS.keys() - FAILING.keys(), key=str.lower))
"""The families that run on a CPU."""


def shipped() -> set[str]:
    """The families that mlx-lm ships: its model files that have a model and its arguments.

    But for those of :data:`LATER` that the installed version is too old for.
    """
    names = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    return {name for name in names if _is_family(name) and _here(name)}


def _is_family(name: str) -> bool:
    module = _module(name)
    return hasattr(module, "Model") and hasattr(module, "ModelArgs")


def _module(family: str) -> ModuleType:
    with _standing_in("hf_olmo"):
        return importlib.import_module(f"mlx_lm.models.{family}")


@contextlib.contextmanager
def _standing_in(name: str) -> Iterator[None]:
    """A package that a model file imports only to see that it is there."""
    missing = name not in sys.modules and importlib.util.find_spec(name) is None
    if missing:
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        if missing:
            del sys.modules[name]


def fields_of(family: str, **overrides: Any) -> dict[str, Any]:
    """What the configuration of :func:`tiny`'s model says."""
    known = inspect.signature(_module(family).ModelArgs).parameters
    fields = {k: v for k, v in COMMON.items() if k in known} | FIELDS[family] | overrides
    return {"model_type": family} | fields if "model_type" in known else fields


def tiny(family: str, **overrides: Any) -> nn.Module:
    """Build a seeded float32 model of a family with about 100,000 parameters.

    Args:
        family: A key of :data:`FIELDS`.
        overrides: Fields of the family's ``ModelArgs``.
    """
    module = _module(family)
    mx.random.seed(7)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(fields_of(family, **overrides)))
    model.update(tree_map(_drawn, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _drawn(x: mx.array) -> mx.array:
    """In float32; drawn at random where a model starts from zeros, which hide what it computes."""
    if not mx.issubdtype(x.dtype, mx.floating):
        return x
    return x.astype(mx.float32) if x.ndim < 2 or x.any() else 0.2 * mx.random.normal(x.shape)


def logits(model: nn.Module, tokens: mx.array, caches: list[Any] | None = None) -> mx.array:
    """The model's logits, ``(B, L, vocabulary)``, whatever it wraps them in."""
    out = model(tokens, cache=caches)
    return getattr(out, "logits", out)
