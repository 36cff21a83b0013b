"""A model with one sequence's caches: read tokens in, get log-probabilities out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from attrs import frozen

from kvcompress.compare.turns import ALONE, Turns

if TYPE_CHECKING:
    from kvcompress.compare.metrics import LogProbs


@frozen(eq=False)
class Session:
    """One sequence going through a model, every token through the caches.

    Attributes:
        model: An mlx-lm model.
        caches: Its list of caches, which grow as tokens are read.
        chunk: Tokens read at a time by :meth:`prefill`.
        turns: Where other sequences are read by other processes.
    """

    model: Any
    caches: list[Any]
    chunk: int
    turns: Turns = ALONE

    def prefill(self, ids: Sequence[int]) -> None:
        """Read tokens in chunks, as mlx-lm does: only what the caches keep is computed."""
        for start in range(0, len(ids), self.chunk):
            with self.turns.together():
                self._forward(ids[start : start + self.chunk])
                self.settle()

    def log_probs(self, ids: Sequence[int], step: int) -> Iterator[LogProbs]:
        """Read tokens ``step`` at a time.

        Args:
            ids: The next tokens of the sequence.
            step: Attention among the tokens of a step is exact.

        Yields:
            For each step, ``(n, vocabulary)`` float32: the log-probabilities of what follows each
            of its tokens.
        """
        for start in range(0, len(ids), step):
            with self.turns.together():
                logits = self._forward(ids[start : start + step])[0].astype(mx.float32)
                log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                self.settle(log_probs)
            yield np.array(log_probs)

    def predictions(self, ids: Sequence[int], count: int, step: int) -> LogProbs:
        """Read tokens; return the last ``count`` rows of :meth:`log_probs`."""
        return np.concatenate(list(self.log_probs(ids, step)))[-count:]

    def greedy(self, first: int, steps: int) -> Iterator[mx.array]:
        """Go on from token ``first``, one most likely token at a time, each computed."""
        token = mx.array([first])
        for _ in range(steps):
            token = mx.argmax(self.model(token[None], cache=self.caches)[0, -1], keepdims=True)
            self.settle(token)
            yield token

    def branch(self) -> Session:
        """A session that goes on from here and leaves this one as it is."""
        return Session(self.model, copy.deepcopy(self.caches), self.chunk, self.turns)

    def settle(self, *arrays: mx.array) -> None:
        """Compute what the caches keep, and ``arrays``."""
        mx.eval(*arrays, [cache.state for cache in self.caches])

    def _forward(self, ids: Sequence[int]) -> mx.array:
        logits: mx.array = self.model(mx.array([list(ids)]), cache=self.caches)
        return logits
