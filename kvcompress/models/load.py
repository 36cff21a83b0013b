"""Load a model by name: the embedded one, a local folder or a hub name."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, cast

from attrs import field, frozen

from kvcompress.errors import ConfigError, UnsupportedModel
from kvcompress.files import is_file, is_folder, user_path
from kvcompress.models.embedded import NAME as EMBEDDED
from kvcompress.models.embedded import ensure_demo_model

if TYPE_CHECKING:
    import mlx.core as mx

DTYPES: Final = ("float32", "float16", "bfloat16")

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@frozen(eq=False)
class LoadedModel:
    """A model with its tokenizer and where both came from.

    Attributes:
        model: The mlx-lm model.
        tokenizer: mlx-lm's tokenizer wrapper.
        name: The name that was asked for.
        source: The folder or hub name it was loaded from.
        dtype: Type of the floating-point parameters, such as ``float32``.
        fingerprint: Hex digest of architecture and weights; see `fingerprint`.
    """

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    name: str
    source: str
    dtype: str
    fingerprint: str


def load_model(name: str = EMBEDDED, dtype: str | None = None) -> LoadedModel:
    """Load a model with mlx-lm.

    On a machine with neither Metal nor CUDA, float16 and bfloat16 parameters are cast to
    float32: only float32 products go through BLAS there, and the others are about thirty times
    slower. Packed weights of a quantised model stay as they are; only their scales and biases are
    cast, which changes no value.

    Args:
        name: ``smollm2-135m`` (fetched once), a local folder, or a hub name ``owner/model``.
        dtype: ``float32``, ``float16`` or ``bfloat16`` for all floating-point parameters; by
            default the model's own, with the exception above.

    Raises:
        ConfigError: ``dtype`` is none of these.
        UnsupportedModel: No such model, or mlx-lm cannot load it.
        DownloadError: The embedded model could not be fetched.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"model: dtype must be one of {', '.join(DTYPES)} (got {dtype!r})")
    source = model_source(name)

    import mlx.core as mx
    import mlx_lm

    try:
        model, tokenizer, config = mlx_lm.load(source, return_config=True)
    except Exception as error:  # whatever mlx-lm, transformers and the hub may raise
        raise UnsupportedModel(
            f"model {name!r}: mlx-lm could not load it ({type(error).__name__}: {error})"
        ) from error
    identity = fingerprint(model, config)
    if dtype is None and only_float32_is_fast():
        dtype = "float32"
    if dtype is not None:
        cast_parameters(model, getattr(mx, dtype))
    return LoadedModel(model, tokenizer, name, source, _main_dtype(model), identity)


def fingerprint(model: Any, config: dict[str, Any]) -> str:
    """Hex digest that tells models, and fine-tunes of one model, apart.

    It covers the configuration that mlx-lm read, the name, shape and packing of every parameter,
    and each parameter's first row, in float32: casting a model up does not change it.

    Args:
        model: An mlx-lm model.
        config: Its configuration.
    """
    import mlx.core as mx
    import numpy as np

    volatile = {"torch_dtype", "dtype", "transformers_version", "_name_or_path"}
    kept = {key: value for key, value in config.items() if key not in volatile}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, parameter in _parameters(model).items():
        row = parameter.reshape(-1)[: parameter.shape[-1] if parameter.ndim else 1]
        if mx.issubdtype(row.dtype, mx.floating):
            row = row.astype(mx.float32)
        digest.update(f"{name} {parameter.shape} {row.dtype}".encode())
        digest.update(np.array(row).tobytes())
    return digest.hexdigest()


def model_source(name: str) -> str:
    """The folder or hub name that mlx-lm is to load.

    Raises:
        UnsupportedModel: It is the name of nothing that mlx-lm could load.
        DownloadError: The embedded model could not be fetched.
    """
    if name == EMBEDDED:
        return str(ensure_demo_model())
    path = user_path(name)
    if name and is_folder(path):
        return str(path)
    if is_file(path):
        raise UnsupportedModel(
            f"model {name!r} is a file; give the folder that holds config.json and *.safetensors"
        )
    if _HUB_NAME.fullmatch(name) and not name.startswith("."):
        return name
    raise UnsupportedModel(
        f"model {name!r} is neither {EMBEDDED!r}, nor a folder, nor a hub name 'owner/model'"
    )


def only_float32_is_fast() -> bool:
    """Whether the machine has neither Metal nor CUDA, so that only float32 goes through BLAS."""
    import mlx.core as mx

    return not (mx.metal.is_available() or mx.cuda.is_available())


def cast_parameters(model: Any, dtype: mx.Dtype) -> None:
    """Cast the floating-point parameters in place, but for those that mlx-lm's model exempts."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    castable = getattr(model, "cast_predicate", lambda name: True)

    def cast_one(name: str, parameter: mx.array) -> mx.array:
        floating = mx.issubdtype(parameter.dtype, mx.floating)
        return parameter.astype(dtype) if floating and castable(name) else parameter

    model.update(tree_map_with_path(cast_one, model.parameters()))
    mx.eval(model.parameters())  # another thread could not


def _parameters(model: Any) -> dict[str, mx.array]:
    """Every parameter under its dotted name."""
    from mlx.utils import tree_flatten

    return cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))


def _main_dtype(model: Any) -> str:
    """The floating-point type that most parameters have."""
    import mlx.core as mx

    sizes: Counter[str] = Counter()
    for parameter in _parameters(model).values():
        if mx.issubdtype(parameter.dtype, mx.floating):
            sizes[str(parameter.dtype).removeprefix("mlx.core.")] += parameter.size
    return sizes.most_common(1)[0][0]
