"""What a model is given a method by, and the codec that the method gives in return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mlx.nn.layers.base import Module

from kvcompress.codec import KVCodec
from kvcompress.config.option import shown
from kvcompress.errors import BrokenPlugin, ConfigError, KVCompressError
from kvcompress.layers import LayerSpec
from kvcompress.method import CompressionMethod

_SIZES = ("kv_heads", "query_heads", "head_dim", "value_dim")


def check_model(who: str, model: object) -> None:
    """Refuse what is no model.

    Raises:
        ConfigError: Naming ``who`` was given it.
    """
    if not isinstance(model, Module):
        raise ConfigError(f"{who}: model must be an mlx.nn.Module (got {type(model).__name__})")


def check_method(who: str, method: object) -> None:
    """Refuse what is no configured method: a method's name, or its class.

    Raises:
        ConfigError: Naming ``who`` was given it.
    """
    if isinstance(method, type) or not isinstance(method, CompressionMethod):
        raise ConfigError(
            f"{who}: method must be a configured method (got {shown(method)}); make one with "
            f"kvcompress.get_method(name)"
        )


def check_caches(who: str, caches: Any) -> None:
    """Refuse what is no list of caches.

    Raises:
        ConfigError: Naming ``who`` was given it.
    """
    if not _lists_caches(caches):
        raise ConfigError(
            f"{who}: caches must be the list that make_cache returned (got {shown(caches)})"
        )


def _lists_caches(given: Any) -> bool:
    listed = isinstance(given, list | tuple)
    return listed and all(hasattr(type(cache), "nbytes") for cache in given)


def bound(method: CompressionMethod, layer: LayerSpec) -> KVCodec:
    """The codec of a layer.

    Raises:
        BrokenPlugin: The method fails in its own way, or gives no codec that fits the layer.
        KVCompressError: As :meth:`~kvcompress.method.CompressionMethod.bind`.
    """
    where = f"{method.name}: bind of layer {layer.index}"
    with _plugin_at(where):
        codec: Any = method.bind(layer)
    if not isinstance(codec, KVCodec):
        raise BrokenPlugin(f"{where} must return a KVCodec (got {shown(codec)})")
    if any(getattr(codec.layer, size) != getattr(layer, size) for size in _SIZES):
        raise BrokenPlugin(f"{where} must return a codec of {layer} (got one of {codec.layer})")
    return codec


def own_caches(method: CompressionMethod, model: Module, count: int) -> list[Any]:
    """The list that a method makes by itself, of as many caches as the model makes.

    Raises:
        BrokenPlugin: The method fails in its own way, or gives no such list.
    """
    where = f"{method.name}: make_cache"
    with _plugin_at(where):
        made: Any = method.make_cache(model)
    if not _lists_caches(made) or len(made) != count:
        raise BrokenPlugin(
            f"{where} must return a list of {count} caches, as the model makes (got {shown(made)})"
        )
    return list(made)


@contextlib.contextmanager
def _plugin_at(where: str) -> Iterator[None]:
    """Blame the plugin for errors that are not ours."""
    try:
        yield
    except KVCompressError:
        raise
    except Exception as error:
        raise BrokenPlugin(f"{where} failed ({type(error).__name__}: {error})") from error
