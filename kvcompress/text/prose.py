"""English prose without a download: the language reference that Python carries for ``help()``.

Its pages overlap: a long page contains shorter ones word for word. Each paragraph is therefore
kept once, in the longest page that has it, before the pages are divided, so that text to
calibrate on and text to measure on share no paragraph. The content changes with Python's version;
whoever reports a measurement reports the text's digest with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

MIN_WORDS: Final = 8
MIN_LETTERS: Final = 0.8
"""Share of letters and spaces above which a paragraph counts as prose."""

_BULLET = re.compile(r"^(?:[*-]|\d+\.|\[\d+\])\s+")
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(?=\S)([^*\n]+?)(?<=\S)\1(?![\w*])")
_LITERAL = re.compile(r'"([^"\s]+)"')
_FOOTNOTE = re.compile(r"\s\[\d+\]")


def prose_halves() -> tuple[str, str]:
    """Divide the reference into two texts of about equal length, by whole pages.

    Returns:
        The text to measure on and the text to calibrate on, paragraphs separated by a blank line.
    """
    halves: tuple[list[str], list[str]] = ([], [])
    lengths = [0, 0]
    for paragraphs in _pages():
        shorter = 0 if lengths[0] <= lengths[1] else 1
        halves[shorter].extend(paragraphs)
        lengths[shorter] += sum(map(len, paragraphs))
    return "\n\n".join(halves[0]), "\n\n".join(halves[1])


def paragraphs_of(page: str) -> Iterator[str]:
    """Yield the paragraphs of prose in a page, on one line each, without markup.

    Headings, grammar, code, tables and signatures are left out.
    """
    for block in re.split(r"\n\s*\n|\n(?=\s*[*-] )", page):
        lines = [line.strip() for line in block.strip().splitlines()]
        text = re.sub(r"\s+", " ", " ".join(lines))
        text = _BULLET.sub("", text)
        text = _FOOTNOTE.sub("", _LITERAL.sub(r"\1", _EMPHASIS.sub(r"\2", text)))
        if _is_prose(text):
            yield text


def _is_prose(text: str) -> bool:
    if len(text.split()) < MIN_WORDS or not re.match(r"[A-Z“(]", text):
        return False
    if not re.search(r"[.:?!)]$", text) or "::=" in text or ">>>" in text:
        return False
    return sum(c.isalpha() or c == " " for c in text) >= MIN_LETTERS * len(text)


def _pages() -> Iterator[list[str]]:
    """Yield the pages, longest first, each without the paragraphs of an earlier one."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for _, page in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        fresh = []
        for paragraph in paragraphs_of(page):
            if paragraph not in seen:
                seen.add(paragraph)
                fresh.append(paragraph)
        yield fresh
