"""What a chunk must be like to be added to a cache, and a count to be taken from it."""

from __future__ import annotations

import operator

import mlx.core as mx

from kvcompress.config.option import shown
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec

_COUNT = "{}: the number of tokens to trim must be an integer from 0 (got {})"


def check_chunk(name: str, layer: LayerSpec, batch: int, keys: mx.array, values: mx.array) -> None:
    """Refuse a chunk that does not fit.

    Args:
        name: The method's name.
        layer: The layer.
        batch: Rows that the cache holds; 0 where it is empty.
        keys: To be ``(B, Hkv, L, D)`` of the layer's dtype.
        values: To be ``(B, Hkv, L, Dv)``.

    Raises:
        ConfigError: It does not fit the layer or what is already held.
    """
    where = f"{name}: layer {layer.index}"
    for part, array, dim in (
        ("keys", keys, layer.head_dim),
        ("values", values, layer.value_dim),
    ):
        if not isinstance(array, mx.array):
            raise ConfigError(f"{where}: {part} must be an mx.array (got {shown(array)})")
        if array.ndim != 4 or array.shape[1] != layer.kv_heads or array.shape[3] != dim:
            raise ConfigError(
                f"{where}: {part} must have shape (B, {layer.kv_heads}, L, {dim}) "
                f"(got {tuple(array.shape)})"
            )
        if array.dtype != layer.mx_dtype:
            raise ConfigError(
                f"{where}: {part} must be {layer.dtype} as when the cache was made "
                f"(got {str(array.dtype).removeprefix('mlx.core.')}); make a new cache after "
                f"changing the model's dtype"
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ConfigError(
            f"{where}: keys and values must have the same tokens "
            f"(got {tuple(keys.shape)} and {tuple(values.shape)})"
        )
    if not keys.shape[0]:
        raise ConfigError(f"{where}: there must be at least one sequence (got 0)")
    if batch not in (0, keys.shape[0]):
        raise ConfigError(f"{where}: the batch size must stay {batch} (got {keys.shape[0]})")


def check_count(name: str, count: object) -> int:
    """A number of tokens to trim, of any integer type, as Python's own.

    Raises:
        ConfigError: It is no integer, or negative.
    """
    try:
        number = int(operator.index(count))  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(_COUNT.format(name, shown(count))) from error
    if isinstance(count, bool):
        raise ConfigError(_COUNT.format(name, count))
    if number < 0:
        raise ConfigError(_COUNT.format(name, number))
    return number
