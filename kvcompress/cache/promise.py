"""Decoded tokens that are handed out and, as a rule, never computed."""

from __future__ import annotations

import io
import threading

import mlx.core as mx
from attrs import define, field


@define(eq=False)
class Promise:
    """Arrays that hold no memory for as long as nobody computes with them.

    To describe them takes time, so steps that read the same codes share one promise: those of one
    thread, in whose streams the arrays would be computed.

    Attributes:
        arrays: Keys ``(B, Hkv, n, D)`` and values ``(B, Hkv, n, Dv)``, once someone wants them.
        read_as_codes: Whether attention has read the codes instead.
        thread: The thread's identity.
    """

    arrays: tuple[mx.array, mx.array] | None = None
    read_as_codes: bool = False
    thread: int = field(factory=threading.get_ident)

    @property
    def serves(self) -> bool:
        """Whether this thread's next step can share it: the last one had no need of the arrays."""
        return self.read_as_codes and self.thread == threading.get_ident()

    @property
    def kept(self) -> bool:
        """Whether someone has computed the arrays, so that they hold memory."""
        return self.arrays is not None and any(_computed(array) for array in self.arrays)


def _computed(array: mx.array) -> bool:
    """MLX has no name for it; but what is computed has let go of the graph that led to it."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "label" not in graph.getvalue()
