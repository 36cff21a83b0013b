"""What would become of each layer of a model under a method, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import frozen

if TYPE_CHECKING:
    from kvcompress.cache.slot import Slot
    from kvcompress.method import CompressionMethod

WORDS: Final = {
    "compressed": "compressed",
    "left": "left as the model makes it",
    "unsupported": "unsupported",
}


@frozen
class Fate:
    """What becomes of a layer's cache; a layer may have several.

    Attributes:
        layer: The layer's place.
        state: One of :data:`WORDS`.
        about: How it is compressed, or why not.
    """

    layer: int
    state: Literal["compressed", "left", "unsupported"]
    about: str


def fates_of(words: str, model: Any) -> tuple[list[Fate], str]:
    """What a method makes of a model's layers.

    A method that lacks its calibration is judged by one of the right size.

    Args:
        words: The method, with options.
        model: An mlx-lm model; its weights may be missing.

    Returns:
        The fate of each cache, and what is to be said of all. There are none where the model
        cannot be run.

    Raises:
        KVCompressError: There is no such method, or the options are not legal.
    """
    from kvcompress.cache.nested import leaves
    from kvcompress.cache.trace import trace
    from kvcompress.compare.methods import method_of
    from kvcompress.errors import UnsupportedModel

    method = method_of(words)
    try:
        slots = trace(model)
    except UnsupportedModel as error:
        return [], str(error)
    with _unlogged():
        caches, note = _caches(method, words, model)
    if caches is None:
        return [_uncompressed(slot, "unsupported", note) for slot in slots], ""
    kept = f"{method.name} keeps the model's own caches"
    if any(method.skip_layers):
        kept = f"skip_layers={'+'.join(map(str, method.skip_layers))}"
    pairs = zip(slots, leaves(caches), strict=True)
    return [
        _compressed(slot, own) or _uncompressed(slot, "left", kept) for slot, own in pairs
    ], note


def alike(fates: Sequence[Fate]) -> list[dict[str, str]]:
    """Each fate once, with the layers that share it."""
    from kvcompress.cache.plan import ranges

    places: dict[tuple[str, str], list[int]] = {}
    for fate in fates:
        places.setdefault((fate.state, fate.about), []).append(fate.layer)
    return [
        {"layers": ranges(where), "state": state, "about": about}
        for (state, about), where in places.items()
    ]


def _caches(method: CompressionMethod, words: str, model: Any) -> tuple[list[Any] | None, str]:
    """The list that the method makes, with what it lacks; or none, and why."""
    from kvcompress.cache import make_cache
    from kvcompress.compare.methods import method_of
    from kvcompress.compare.sized import sized_calibration
    from kvcompress.errors import CalibrationRequired, KVCompressError

    lacks = ""
    try:
        try:
            return make_cache(method, model), lacks
        except CalibrationRequired as error:
            lacks = str(error)
        # Which layers it takes does not depend on what its tables hold.
        return make_cache(method_of(words, sized_calibration(method, model)), model), lacks
    except KVCompressError as error:
        return None, str(error)
    except Exception:  # a plugin's fit may raise anything
        return None, lacks


def _compressed(slot: Slot, cache: Any) -> Fate | None:
    from kvcompress.cache.kvcache import CompressedKVCache

    if not isinstance(cache, CompressedKVCache):
        return None
    layer = cache.layer
    numbers = layer.kv_heads * (layer.head_dim + layer.value_dim)
    heads = f"{layer.kv_heads} key head" + "s" * (layer.kv_heads > 1)
    about = [
        f"{heads} of {layer.head_dim} channels",
        f"{8 * cache.codec.schema.bytes_per_token / numbers:.2f} bits a number",
    ]
    if layer.value_dim != layer.head_dim:
        about.insert(1, f"values of {layer.value_dim}")
    if not layer.rotary_known:
        about.append("its rotation is not known")
    reason = f"; {slot.reason}" if slot.reason else ""
    return Fate(slot.index, "compressed", ", ".join(about) + reason)


def _uncompressed(slot: Slot, state: Literal["left", "unsupported"], why: str) -> Fate:
    """The fate of a cache for its own reason, or else, as ``state``, for the method's."""
    if slot.kind == "compress":
        return Fate(slot.index, state, why)
    return Fate(slot.index, "left" if slot.kind == "plain" else "unsupported", slot.reason)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without the notice of what stays plain, which is printed in full."""
    logger = logging.getLogger("kvcompress")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
