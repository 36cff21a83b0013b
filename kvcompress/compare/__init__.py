"""Compare methods on a real model: quality, memory and speed, each row in a process of its own."""

from __future__ import annotations

from kvcompress.compare.metrics import Metric
from kvcompress.compare.plugins import Workload
from kvcompress.compare.protocol import QUICK, STANDARD, Protocol
from kvcompress.compare.report import Report, Row
from kvcompress.compare.runner import DEFAULT_METHODS, YARDSTICKS, Observer, compare

__all__ = [
    "DEFAULT_METHODS",
    "QUICK",
    "STANDARD",
    "YARDSTICKS",
    "Metric",
    "Observer",
    "Protocol",
    "Report",
    "Row",
    "Workload",
    "compare",
]
