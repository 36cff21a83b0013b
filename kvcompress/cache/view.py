"""Lazy arrays that remember the cache they came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import mlx.core as mx

if TYPE_CHECKING:
    from kvcompress.attention.masks import Mask


class Attends(Protocol):
    """What can attend for one forward step."""

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """``(B, Hq, L, D)`` queries to ``(B, Hq, L, Dv)``."""
        ...


class View(mx.array):
    """A decoded K or V that has not been computed, tagged with the step that can attend for it."""

    step: Attends
    part: Literal["key", "value"]


def view(dense: mx.array, step: Attends, part: Literal["key", "value"]) -> View:
    """Tag ``dense``, ``(B, H, T, D)``; any operation on the view gives a plain array."""
    tagged = View(dense)
    tagged.step = step
    tagged.part = part
    return tagged
