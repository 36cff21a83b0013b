"""Real text to calibrate on and to measure on, and a retrieval test made from it."""

from __future__ import annotations

from kvcompress.text.facts import Fact, RetrievalPrompt, build_retrieval_prompt
from kvcompress.text.sources import BUILTIN, Text, encode, load_text

__all__ = [
    "BUILTIN",
    "Fact",
    "RetrievalPrompt",
    "Text",
    "build_retrieval_prompt",
    "encode",
    "load_text",
]
