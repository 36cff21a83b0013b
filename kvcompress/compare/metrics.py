"""How far a method's predictions are from full precision, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, SupportsFloat

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from kvcompress.errors import KVCompressError

LogProbs = NDArray[np.float32]
Targets = NDArray[np.int64]
PerToken = NDArray[np.float64]
Measures = dict[str, float | None]
"""Numbers by name; ``None`` where there is none."""

BLOCK: Final = 32
"""Tokens of a block whose mean counts as one independent draw for standard errors."""


@frozen
class Metric:
    """A number for each scored token; the mean over tokens is what a report shows.

    A plugin adds metrics by the hook ``kvcompress_metrics``, which returns them by name.

    Attributes:
        title: Heading of the column.
        per_token: Called for a few tokens at a time with the log-probabilities of full precision
            and of the method, both ``(n, vocabulary)`` float32, and the ``n`` tokens that the
            text goes on with. Returns ``n`` numbers.
        help: One sentence for the legend.
    """

    title: str
    per_token: Callable[[LogProbs, LogProbs, Targets], PerToken]
    help: str


def divergence(full: LogProbs, method: LogProbs, targets: Targets) -> PerToken:
    """Kullback-Leibler divergence of the method from full precision, in nats.

    Products are float32 and sums float64. A token that full precision rules out adds nothing.
    """
    with np.errstate(invalid="ignore"):
        terms = np.exp(full) * (full - method)
    total: PerToken = np.sum(terms, axis=-1, dtype=np.float64, where=np.isfinite(full))
    return total


def nll(log_probs: LogProbs, targets: Targets) -> PerToken:
    """Negative log-likelihood of each target, in nats."""
    chosen = np.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0]
    return -chosen.astype(np.float64)


def nll_change(full: LogProbs, method: LogProbs, targets: Targets) -> PerToken:
    """How much less likely the method finds each target, in nats."""
    return nll(method, targets) - nll(full, targets)


def agreement(full: LogProbs, method: LogProbs, targets: Targets) -> PerToken:
    """1 where both find the same token most likely, else 0."""
    same: PerToken = (full.argmax(axis=-1) == method.argmax(axis=-1)).astype(np.float64)
    return same


def _own_nll(full: LogProbs, method: LogProbs, targets: Targets) -> PerToken:
    return nll(method, targets)


METRICS: Final[Mapping[str, Metric]] = {
    "kl": Metric("KL", divergence, "divergence from full precision in nats a token"),
    "nll_change": Metric("ΔNLL", nll_change, "change of the loss on the text in nats a token"),
    "top1": Metric("top-1", agreement, "share of tokens with the same first choice"),
    "nll": Metric("NLL", _own_nll, "loss on the text in nats a token"),
}
"""The metrics of every comparison."""


def block_error(windows: Sequence[PerToken], block: int = BLOCK) -> float | None:
    """Standard error of the mean of a per-token series.

    Neighbouring tokens share their context, so their values are correlated and a plain standard
    error comes out too small. The means of blocks of neighbours are taken as independent instead.

    Args:
        windows: The series of each window; no block reaches from one into the next.
        block: Tokens of a block, about.

    Returns:
        The standard error, or ``None`` where there are fewer than two blocks.
    """
    means = [
        part.mean()
        for series in windows
        for part in np.array_split(series, -(-len(series) // block))
    ]
    if len(means) < 2:
        return None
    return float(np.std(means, ddof=1) / np.sqrt(len(means)))


def finite(name: str, value: SupportsFloat) -> float:
    """Return a number that a report can show.

    Raises:
        KVCompressError: It is infinite or no number.
    """
    number = float(value)
    if not math.isfinite(number):
        raise KVCompressError(
            f"{name}: not finite; the model's output through this cache is broken"
        )
    return number


@define
class Tally:
    """Metrics of one method, gathered step by step.

    Attributes:
        metrics: The metrics by name.
    """

    metrics: Mapping[str, Metric]
    _series: dict[str, list[list[PerToken]]] = field(factory=dict, init=False)

    def start_window(self) -> None:
        """Begin a stretch of text of its own."""
        for name in self.metrics:
            self._series.setdefault(name, []).append([])

    def add(self, full: LogProbs, method: LogProbs, targets: Targets) -> None:
        """Take a step's log-probabilities in.

        Raises:
            KVCompressError: A metric gave other than one finite number a token.
        """
        for name, metric in self.metrics.items():
            values = np.asarray(metric.per_token(full, method, targets), dtype=np.float64)
            if values.shape != targets.shape:
                raise KVCompressError(
                    f"metric {name}: must give one number a token, shape {targets.shape} "
                    f"(got {values.shape})"
                )
            self._series[name][-1].append(values)
            finite(name, values.sum())

    def summary(self) -> Measures:
        """Mean and standard error (``NAME_se``) of each metric, and the perplexity."""
        out: Measures = {}
        for name, windows in self._series.items():
            series = [np.concatenate(window) for window in windows]
            out[name] = float(np.concatenate(series).mean())
            out[f"{name}_se"] = block_error(series)
        loss = out.get("nll")
        if loss is not None:
            out["perplexity"] = float(np.exp(loss))
        return out
