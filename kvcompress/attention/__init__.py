"""Attention over exact and coded tokens, tile by tile."""

from kvcompress.attention.rows import DEFAULT_BUDGET
from kvcompress.attention.segments import CodedSegment, ExactSegment, Segment
from kvcompress.attention.selection import MOST_QUERIES, share_of, unread_share
from kvcompress.attention.tiled import attend

__all__ = [
    "DEFAULT_BUDGET",
    "MOST_QUERIES",
    "CodedSegment",
    "ExactSegment",
    "Segment",
    "attend",
    "share_of",
    "unread_share",
]
