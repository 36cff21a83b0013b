"""Compare methods on a real model: quality, memory and speed, each row in a process of its own."""

from __future__ import annotations

from kvcompress.compare.metrics import Metric
from kvcompress.compare.plugins import Workload
from kvcompress.compare.protocol import QUICK, STANDARD, Protocol
from kvcompress.compare.report import Report, Row
from kvcompress.compare.runner import DEFAULT_METHODS, YARDSTICKS, Observer, compare
from kvcompress.compare.score_report import ScoreReport, ScoreRow
from kvcompress.compare.scores import SCORE_METHODS, WORKLOADS, compare_scores

__all__ = [
    "DEFAULT_METHODS",
    "QUICK",
    "SCORE_METHODS",
    "STANDARD",
    "WORKLOADS",
    "YARDSTICKS",
    "Metric",
    "Observer",
    "Protocol",
    "Report",
    "Row",
    "ScoreReport",
    "ScoreRow",
    "Workload",
    "compare",
    "compare_scores",
]
