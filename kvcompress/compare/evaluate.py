"""One method on a loaded model: what the protocol measures, all of it through the caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import field, frozen

from kvcompress.compare.memory import active_bytes, memory_measures
from kvcompress.compare.metrics import Measures, Metric, Tally, finite
from kvcompress.compare.plugins import Workload
from kvcompress.compare.protocol import Protocol
from kvcompress.compare.reference import Reference
from kvcompress.compare.retrieval import retrieval
from kvcompress.compare.session import Session
from kvcompress.compare.turns import ALONE, Turns
from kvcompress.text import RetrievalPrompt


@frozen
class Evaluation:
    """What came of a method.

    Attributes:
        measures: Numbers that are the same in every run.
        readings: Numbers that are not: times, and what MLX's allocator says of memory.
    """

    measures: Measures
    readings: Measures


@frozen(eq=False, kw_only=True)
class Evaluator:
    """Runs a protocol on a model, whatever makes the caches.

    Attributes:
        model: An mlx-lm model with its weights in memory.
        tokenizer: Its tokenizer.
        protocol: What to run.
        metrics: Per-token metrics by name.
        reference: Full precision's log-probabilities.
        workloads: Further tasks by name.
        prompt: The retrieval test, unless it is left out.
        turns: Where other rows are measured at the same time.
    """

    model: Any
    tokenizer: Any
    protocol: Protocol
    metrics: Mapping[str, Metric]
    reference: Reference
    workloads: Mapping[str, Workload] = field(factory=dict)
    prompt: RetrievalPrompt | None = None
    turns: Turns = ALONE

    def run(
        self, make_caches: Callable[[], list[Any]], windows: Sequence[Sequence[int]]
    ) -> Evaluation:
        """Score every window, then run the tasks.

        Args:
            make_caches: Makes the caches of a new sequence.
            windows: ``context + scored`` tokens each. Memory is counted in the first; decoding
                goes on from the end of the last.
        """
        tally = Tally(self.metrics)
        measures: Measures = {}
        readings: Measures = {}
        for index, window in enumerate(windows):
            before = active_bytes()
            mx.reset_peak_memory()
            session = self._session(make_caches())
            tally.start_window()
            self._score(session, window, tally)
            if index == 0:
                readings["peak_bytes"] = int(mx.get_peak_memory()) - before
                readings["active_bytes"] = active_bytes() - before
                measures |= memory_measures(session.caches, self.model, len(window) - 1)
            if index == len(windows) - 1:
                readings |= self._time_decoding(session, window[-1])
            del session  # before the next sequence's memory is counted
        if self.prompt is not None:
            measures |= retrieval(self._session(make_caches()), self.prompt)
        for name, workload in self.workloads.items():
            session = self._session(make_caches())
            measures[name] = finite(name, workload.run(session, self.tokenizer, self.protocol))
        return Evaluation({**tally.summary(), **measures}, readings)

    def _session(self, caches: list[Any]) -> Session:
        return Session(self.model, caches, self.protocol.chunk, self.turns)

    def _score(self, session: Session, window: Sequence[int], tally: Tally) -> None:
        first = self.protocol.context
        session.prefill(window[: first - 1])
        # The last token of the context predicts the first scored one.
        read, targets = window[first - 1 : -1], np.array(window[first:], dtype=np.int64)
        done = 0
        for rows in session.log_probs(read, self.protocol.step):
            tally.add(self.reference.rows_for(rows), rows, targets[done : done + len(rows)])
            done += len(rows)

    def _time_decoding(self, session: Session, token: int) -> Measures:
        """Tokens a second from the median step, so that a hiccup of the machine counts little."""
        if not self.protocol.decode:
            return {}
        with self.turns.alone():
            seconds = list(durations(session.greedy(token, self.protocol.decode + 1)))
        # The first step also pays for what is made once.
        return {"decode_tokens_per_second": 1 / statistics.median(seconds[1:])}


def durations(steps: Iterator[object]) -> Iterator[float]:
    """Seconds that each item took to come."""
    last = time.perf_counter()
    for _ in steps:
        now = time.perf_counter()
        yield now - last
        last = now
