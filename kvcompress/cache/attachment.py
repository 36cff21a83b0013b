"""Give a model compressed caches: a list for one conversation, or everywhere by attaching."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from mlx.nn.layers.base import Module

from kvcompress.cache.binding import check_method, check_model, own_caches
from kvcompress.cache.native import CacheMaker, attached_to, native_caches
from kvcompress.cache.plan import make_plan
from kvcompress.errors import ConfigError
from kvcompress.method import CompressionMethod, Method

_attaching = threading.Lock()
_asked = threading.local()  # the methods whose own make_cache is running in this thread


def make_cache(method: CompressionMethod, model: Module) -> list[Any]:
    """Make one cache a layer, compressed where that is possible, for ``prompt_cache=``.

    Layers that stay as the model makes them are named in one notice of the logger ``kvcompress``.

    Args:
        method: A configured method; one that makes its caches itself is asked to.
        model: An mlx-lm model.

    Returns:
        A list as long as the one that the model makes.

    Raises:
        UnsupportedModel: No layer can be compressed.
        ConfigError: It is no configured method or does not fit a layer, or ``skip_layers`` leaves
            none.
    """
    check_method("make_cache", method)
    running: set[int] = _asked.__dict__.setdefault("methods", set())
    if not _makes_its_own(method) or id(method) in running:
        return make_plan(method, model).caches(model)
    running.add(id(method))
    try:
        return own_caches(method, model, len(native_caches(model)))
    finally:
        running.discard(id(method))


def _makes_its_own(method: CompressionMethod) -> bool:
    return type(method).make_cache is not Method.make_cache


def attach(model: Module, method: CompressionMethod) -> Attachment:
    """Let ``model.make_cache()`` give compressed caches, until :func:`detach`.

    mlx-lm's generation, batches, server and command line all make their caches through it.
    Conversations that are under way keep the caches they have.

    Args:
        model: An mlx-lm model.
        method: A configured method.

    Returns:
        The attachment, to be used as a context manager or let go.

    Raises:
        UnsupportedModel: No layer can be compressed.
        ConfigError: A method is attached already, or this one is none or does not fit the model.
    """
    check_model("attach", model)
    check_method("attach", method)
    with _attaching:
        maker = attached_to(model)
        if maker is not None:
            raise ConfigError(
                f"attach: {maker.method.name} is attached to this model already; "
                f"call kvcompress.detach(model) first"
            )
        if _makes_its_own(method):
            maker = CacheMaker(model, method, lambda model: make_cache(method, model))
        else:
            maker = CacheMaker(model, method, make_plan(method, model).caches)
        maker.put()
    return Attachment(maker)


def detach(model: Module) -> None:
    """Leave a model as it was before :func:`attach`; does nothing where no method is attached.

    Raises:
        ConfigError: It is no model.
    """
    check_model("detach", model)
    maker = attached_to(model)
    if maker is not None:
        maker.remove()


class Attachment:
    """A method attached to a model; as a context manager it detaches when it is left."""

    def __init__(self, maker: CacheMaker) -> None:
        self._maker = maker

    def detach(self) -> None:
        """Leave the model as it was; does nothing where that has happened already."""
        self._maker.remove()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()
