"""What a chunk must be like to be added to a cache."""

from __future__ import annotations

import mlx.core as mx

from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec


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
    if batch not in (0, keys.shape[0]):
        raise ConfigError(f"{where}: the batch size must stay {batch} (got {keys.shape[0]})")
