"""What queries must be like to be asked of a layer's tokens."""

from __future__ import annotations

import mlx.core as mx

from kvcompress.config.option import shown
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec


def check_queries(layer: LayerSpec, batch: int, queries: mx.array, sinks: mx.array | None) -> None:
    """Refuse queries that do not fit the tokens, and learnt logits that do not fit the queries.

    Args:
        layer: The layer.
        batch: Rows of tokens, ``B``.
        queries: To be ``(B, Hq, L, D)``, any float dtype, ``Hq`` a multiple of the KV heads.
        sinks: To be ``(Hq,)``, or ``None``.

    Raises:
        ConfigError: They do not fit.
    """
    if not _floats(queries) or queries.ndim != 4 or not _fits(layer, batch, queries.shape):
        raise ConfigError(
            f"attention: layer {layer.index}: queries must be floats of shape ({batch}, n * "
            f"{layer.kv_heads}, L, {layer.head_dim}) (got {shown(queries)})"
        )
    heads = queries.shape[1]
    if sinks is not None and (not _floats(sinks) or sinks.shape != (heads,)):
        raise ConfigError(
            f"attention: layer {layer.index}: sinks must be floats of shape ({heads},), one a "
            f"query head (got {shown(sinks)})"
        )


def _floats(array: object) -> bool:
    return isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.floating)


def _fits(layer: LayerSpec, batch: int, shape: tuple[int, ...]) -> bool:
    heads = shape[1]
    grouped = heads > 0 and heads % layer.kv_heads == 0
    return grouped and (shape[0], shape[3]) == (batch, layer.head_dim)
