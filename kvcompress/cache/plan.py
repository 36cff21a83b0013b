"""What a method makes of a model: which entries it compresses, and with which codec."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from attrs import frozen
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache

from kvcompress.cache.binding import bound
from kvcompress.cache.dispatch import Lease, install, modules_of
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.native import native_caches
from kvcompress.cache.nested import leaves, with_leaves
from kvcompress.cache.slot import Slot
from kvcompress.cache.trace import trace
from kvcompress.codec import KVCodec
from kvcompress.errors import ConfigError, UnsupportedModel
from kvcompress.method import CompressionMethod

_log = logging.getLogger("kvcompress")
_told: set[str] = set()


@frozen(eq=False)
class Plan:
    """A method bound to the layers of a model.

    Attributes:
        method: The method.
        slots: What the trace says of each of the model's caches.
        codecs: The codec of each layer that is compressed, by the layer's index.
        lease: Keeps the model's attention hooked.
    """

    method: CompressionMethod
    slots: tuple[Slot, ...]
    codecs: dict[int, KVCodec]
    lease: Lease

    def caches(self, model: Module) -> list[Any]:
        """A fresh list of caches for one conversation.

        Raises:
            UnsupportedModel: The model no longer makes the caches that were traced.
        """
        caches = native_caches(model)
        own = leaves(caches)
        if len(own) != len(self.slots):
            raise UnsupportedModel(
                f"{self.method.name}: the model makes {len(own)} caches, but made "
                f"{len(self.slots)} when its layers were learnt"
            )
        return with_leaves(caches, map(self._chosen, self.slots, own))

    def compresses(self, slot: Slot) -> bool:
        """Whether the cache of a slot is replaced."""
        return slot.layer is not None and slot.layer.index in self.codecs

    def _chosen(self, slot: Slot, cache: Any) -> Any:
        """The cache that stands in a slot's place."""
        if slot.layer is None or not self.compresses(slot):
            return cache
        if type(cache) is not KVCache:
            raise UnsupportedModel(
                f"{self.method.name}: entry {slot.index} of the model's caches is a "
                f"{type(cache).__name__}, but was a KVCache when its layers were learnt"
            )
        return CompressedKVCache(
            method=self.method,
            layer=slot.layer,
            codec=self.codecs[slot.layer.index],
            lease=self.lease,
            shared=slot.readers > 1,
        )


def make_plan(method: CompressionMethod, model: Module) -> Plan:
    """Bind a method to every layer that it compresses, and say which ones stay plain.

    Args:
        method: A configured method.
        model: An mlx-lm model.

    Raises:
        UnsupportedModel: No layer can be compressed, or other processes hold some of them.
        ConfigError: ``skip_layers`` leaves none, or the method does not fit a layer.
        BrokenPlugin: The method gives no codec.
    """
    if isinstance(model, Module):  # what is none is told by the trace
        _check_not_piped(method, model)
    slots = trace(model)
    fit = [slot for slot in slots if slot.kind == "compress"]
    if not fit:
        raise UnsupportedModel(
            f"{method.name}: no layer of {_kind(model)} can be compressed: {_reasons(slots)}"
        )
    first, last = method.skip_layers
    chosen = fit[first : max(len(fit) - last, first)]
    if not chosen:
        raise ConfigError(
            f"{method.name}: skip_layers must leave one of the {len(fit)} layers that can be "
            f"compressed (got {first}, {last})"
        )
    codecs = {s.layer.index: bound(method, s.layer) for s in chosen if s.layer}
    plan = Plan(method, slots, codecs, install(model))
    _tell(plan, model)
    return plan


def _check_not_piped(method: CompressionMethod, model: Module) -> None:
    """Refuse a part of a pipeline, whose layers would be taken for the first of the whole model."""
    stages = max(getattr(module, "pipeline_size", 1) for module in modules_of(model))
    if stages > 1:
        raise UnsupportedModel(
            f"{method.name}: the layers of {_kind(model)} are spread over a pipeline of {stages} "
            f"processes; only its heads can be: model.shard(group)"
        )


def _tell(plan: Plan, model: Module) -> None:
    """Log once what is compressed; a warning where a cache stays plain, or is only half served."""
    chosen = [slot for slot in plan.slots if plan.compresses(slot)]
    places = {slot.index for slot in chosen}
    text = (
        f"{plan.method.name} on {_kind(model)}: {len(places)} of "
        f"{len({slot.index for slot in plan.slots})} layers compressed ({ranges(places)})"
    )
    left = _reasons(slot for slot in plan.slots if slot.kind != "compress")
    blind = _reasons(slot for slot in chosen if slot.reason)
    text += f"; left as the model makes them: {left}" if left else ""
    text += f"; compressed at rest only: {blind}" if blind else ""
    if text not in _told:
        _told.add(text)
        _log.log(logging.WARNING if left or blind else logging.INFO, text)


def _reasons(slots: Iterable[Slot]) -> str:
    """Each reason once, after the places it holds for."""
    places: dict[str, list[int]] = {}
    for slot in slots:
        places.setdefault(slot.reason, []).append(slot.index)
    return "; ".join(f"{ranges(where)} ({reason})" for reason, where in places.items())


def ranges(places: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2, 5"``; a place that comes twice counts once."""
    runs: list[list[int]] = []
    for place in sorted(set(places)):
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _kind(model: Module) -> str:
    return str(getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2])
