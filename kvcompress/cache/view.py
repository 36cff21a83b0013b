"""Lazy arrays that remember the step they came from, so that attention can find its codes."""

from __future__ import annotations

from typing import Literal, Protocol

import mlx.core as mx

Part = Literal["key", "value"]


class Attends(Protocol):
    """What a view leads to: the tokens of one step, which answer queries without being decoded."""

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of ``(B, Hq, L, D)`` queries over the step's tokens: ``(B, Hq, L, Dv)``."""
        ...


class View(mx.array):
    """A decoded K or V that has not been computed, tagged with the step that can attend for it.

    Whoever computes with it has the dense array, and any operation on it gives a plain one.
    """

    step: Attends
    part: Part


def view(dense: mx.array, step: Attends, part: Part) -> View:
    """Tag ``dense``, ``(B, H, T, D)``, without computing or copying it."""
    tagged = View(dense)
    tagged[...] = dense  # the constructor alone would copy the array once it is computed
    tagged.step = step
    tagged.part = part
    return tagged


def views(keys: mx.array, values: mx.array, step: Attends) -> tuple[View, View]:
    """Tag the keys and the values of a step, ``(B, H, T, D)`` and ``(B, H, T, Dv)``."""
    return view(keys, step, "key"), view(values, step, "value")


def step_of(keys: object, values: object) -> Attends | None:
    """The step behind a pair that attention was given as keys and values.

    Returns:
        ``None`` unless they are the keys and the values of one and the same step.
    """
    if type(keys) is not View or type(values) is not View:
        return None
    if keys.step is not values.step or keys.part != "key" or values.part != "value":
        return None
    return keys.step
