"""A model whose weights are never read, for arithmetic on its caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcompress.errors import ConfigError, UnsupportedModel
from kvcompress.files import is_folder
from kvcompress.models.load import DTYPES, model_source, only_float32_is_fast


def skeleton(name: str, dtype: str | None = None) -> Any:
    """Build a model from its configuration, with weights that nobody computes.

    Its caches have the type that :func:`kvcompress.models.load_model` would give them: float32
    on a machine with neither Metal nor CUDA, else the model's own.

    Args:
        name: ``smollm2-135m``, a folder that holds ``config.json``, or a hub name, of which only
            ``config.json`` is fetched.
        dtype: ``float32``, ``float16`` or ``bfloat16`` in place of that.

    Raises:
        ConfigError: ``dtype`` is none of these.
        UnsupportedModel: No such model, or mlx-lm cannot build it.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"model: dtype must be one of {', '.join(DTYPES)} (got {dtype!r})")
    folder = _folder(name)

    import mlx.core as mx
    from mlx_lm.utils import load_model

    more = {} if any(folder.glob("model*.safetensors")) else {"get_model_classes": _bare_classes}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, _ = load_model(folder, lazy=True, strict=False, **more)
    except Exception as error:  # whatever mlx-lm may raise
        raise UnsupportedModel(
            f"model {name!r}: mlx-lm could not build it ({type(error).__name__}: {error})"
        ) from error
    model.set_dtype(getattr(mx, dtype or _own_dtype(config)))
    return model


def _bare_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """A family's classes, whose model does not rename weights: some fail where there are none."""
    from mlx_lm.utils import _get_classes

    kind, arguments = _get_classes(config=config)
    unchanged = {"__module__": kind.__module__, "sanitize": lambda model, weights: weights}
    return type(kind.__name__, (kind,), unchanged), arguments


def _folder(name: str) -> Path:
    """The folder with the model's ``config.json``."""
    source = model_source(name)
    if is_folder(Path(source)):
        return Path(source)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, "config.json")).parent
    except Exception as error:  # whatever the hub and the network may raise
        raise UnsupportedModel(
            f"model {name!r} is no folder, and its config.json could not be fetched from the hub "
            f"({type(error).__name__})"
        ) from error


def _own_dtype(config: dict[str, Any]) -> str:
    """The type that the model would be loaded in here."""
    if only_float32_is_fast():
        return "float32"
    text = config.get("text_config", {})
    named = (d.get(key) for d in (config, text) for key in ("torch_dtype", "dtype"))
    return next((dtype for dtype in named if dtype in DTYPES), "float32")
