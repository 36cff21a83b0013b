"""The caches that a model makes for itself, whether or not a method is attached to it."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mlx.nn.layers.base import Module

from kvcompress.cache.binding import check_model
from kvcompress.errors import UnsupportedModel
from kvcompress.method import CompressionMethod

ATTRIBUTE = "make_cache"


class CacheMaker:
    """Stands on a model as its ``make_cache`` while a method is attached to it.

    It does not keep the model alive. When it is called again while it builds, as a builder does
    that starts from the model's own caches, it gives those.

    Args:
        model: The model.
        method: The method attached to it.
        build: Makes the list of caches.
    """

    def __init__(
        self,
        model: Module,
        method: CompressionMethod,
        build: Callable[[Module], list[Any]],
    ) -> None:
        self.method = method
        self._model = weakref.ref(model)
        self._build = build
        self._replaced: Callable[[], Any] | None = vars(model).get(ATTRIBUTE)
        self._building = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheMaker:
        """For a copy of the model, which has the method attached as well."""
        twin = memo.get(id(self._model()))
        if twin is None:
            return self
        maker = CacheMaker(twin, self.method, self._build)
        maker._replaced = copy.deepcopy(self._replaced, memo)
        return maker

    def __call__(self) -> list[Any]:
        """One cache a layer, compressed where the method compresses."""
        model = self._model()
        if model is None:
            raise UnsupportedModel("make_cache: the model that the method was attached to is gone")
        if getattr(self._building, "now", False):
            return self.native(model)
        self._building.now = True
        try:
            return self._build(model)
        finally:
            self._building.now = False

    def native(self, model: Module) -> list[Any]:
        """What ``model.make_cache()`` or mlx-lm would give if nothing were attached."""
        from mlx_lm.models.cache import make_prompt_cache

        if self._replaced is not None:
            return list(self._replaced())
        own = getattr(type(model), ATTRIBUTE, None)
        if own is not None:
            return list(own(model))
        return list(make_prompt_cache(SimpleNamespace(layers=model.layers)))

    def put(self) -> None:
        """Stand on the model."""
        model = self._model()
        if model is not None:
            setattr(model, ATTRIBUTE, self)

    def remove(self) -> None:
        """Leave the model as it was; what somebody else has put in this place stays."""
        model = self._model()
        if model is None or attached_to(model) is not self:
            return
        if self._replaced is None:
            delattr(model, ATTRIBUTE)
        else:
            setattr(model, ATTRIBUTE, self._replaced)


def attached_to(model: Module) -> CacheMaker | None:
    """What stands on the model as its ``make_cache``, if a method is attached."""
    maker = vars(model).get(ATTRIBUTE)
    return maker if isinstance(maker, CacheMaker) else None


def native_caches(model: Module) -> list[Any]:
    """Fresh caches as the model makes them for itself.

    Raises:
        ConfigError: It is no model.
    """
    check_model("make_cache", model)
    from mlx_lm.models.cache import make_prompt_cache

    maker = attached_to(model)
    return list(make_prompt_cache(model)) if maker is None else maker.native(model)
