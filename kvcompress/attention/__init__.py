"""Attention over exact and coded tokens, tile by tile."""

from kvcompress.attention.segments import CodedSegment, ExactSegment, Segment
from kvcompress.attention.tiled import DEFAULT_BUDGET, attend

__all__ = ["DEFAULT_BUDGET", "CodedSegment", "ExactSegment", "Segment", "attend"]
