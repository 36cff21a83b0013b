from __future__ import annotations

import re

import pytest

from kvcompress.text.prose import paragraphs_of, prose_halves

PAGE = """
The "while" statement
*********************

The "while" statement is used for *repeated* execution as long as an
expression is true, **always**:  see "a b". [2]

   while_stmt ::= "while" assignment_expression ":" suite and more words here

   >>> while True: print("some words that go on and on and on")

   An indented paragraph that *any* reader can follow without any trouble.

* A first item whose words are plain and many enough to count.

* A second item: its words, too, are plain and many enough to count.
  It goes on here.

object.__setitem__(self, key, value)

Short text.
x = {1: [2, 3], 4: [5, 6]} + (7, 8) * [9, 10] - {11: 12, 13: 14, 15: 16}.
"""


def test_keeps_prose_without_markup_and_drops_the_rest() -> None:
    assert list(paragraphs_of(PAGE)) == [
        "The while statement is used for repeated execution as long as an expression is true, "
        'always: see "a b".',
        "An indented paragraph that any reader can follow without any trouble.",
        "A first item whose words are plain and many enough to count.",
        "A second item: its words, too, are plain and many enough to count. It goes on here.",
    ]


@pytest.mark.parametrize("text", ["2 ** 3 and a*b*c", "**kwargs and *args", "a * b * c"])
def test_leaves_operators_alone(text: str) -> None:
    page = f"Consider the expression {text} and what it means to you."
    assert list(paragraphs_of(page)) == [page]


def test_the_halves_share_no_paragraph_and_have_about_one_length() -> None:
    halves = [half.split("\n\n") for half in prose_halves()]
    assert not set(halves[0]) & set(halves[1])
    for half in halves:
        assert len(half) == len(set(half))
    sizes = [len("".join(half)) for half in halves]
    assert min(sizes) > 0.8 * max(sizes)
    assert min(sizes) > 50_000


def test_the_halves_read_like_english() -> None:
    for half in prose_halves():
        words = re.findall(r"[a-z]+", half.lower())
        common = sum(word in {"the", "a", "of", "is", "to", "in", "and", "that"} for word in words)
        assert common > 0.2 * len(words)
        assert "::=" not in half
        assert "****" not in half


def test_is_the_same_every_time() -> None:
    assert prose_halves() == prose_halves()
