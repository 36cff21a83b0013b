"""Lazy arrays that remember the cache they came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import mlx.core as mx

if TYPE_CHECKING:
    from kvcompress.cache.step import Step


class View(mx.array):
    """A decoded K or V that has not been computed, tagged with the step that can attend for it."""

    step: Step
    part: Literal["key", "value"]


def view(dense: mx.array, step: Step, part: Literal["key", "value"]) -> View:
    """Tag ``dense``, ``(B, H, T, D)``; any operation on the view gives a plain array."""
    tagged = View(dense)
    tagged.step = step
    tagged.part = part
    return tagged
