"""A retrieval test that a small base model passes at full precision.

Chat questions, needles in one repeated template and lists of keys and values all fail on a model
of 135 million parameters even uncompressed, so they would measure the model. Two things do work:
finishing a sentence that stands in the context, and going on with a passage that stands in it. The
context is a passage, then prose with twelve facts spread evenly, each in a sentence of its own
kind that ends in a four-digit number. A probe repeats a sentence up to its number, or the
passage's beginning; what should follow is known. Score accuracy and, since it does not move in
steps, the log-probability.
"""

from __future__ import annotations

import random
from itertools import chain
from typing import Any, Final

from attrs import frozen

from kvcompress.errors import ConfigError
from kvcompress.text.sources import encode, load_text

PASSAGE_TOKENS: Final = 256
CUE_TOKENS: Final = 16
CANDIDATES: Final = 32
BREAK: Final = "\n\n"

STEMS: Final = (
    "The safe in the harbour master's office opens with the number",
    "Grandmother Adela was born on her uncle's farm in the year",
    "According to the survey, the summit of Mount Kestrel rises to a height in feet of",
    "To reach the night pharmacist, dial extension",
    "The museum's only Egyptian bronze is listed in the catalogue as item",
    "At the last count, the village school library held a number of books equal to",
    "Our train to the coast is pulled by the locomotive numbered",
    "When the auction closed, the blue violin had been sold for a price in dollars of",
    "Captain Moreau wrote in his log that the crew had eaten barrels of biscuit to the number of",
    "The password for the greenhouse thermostat has been changed to",
    "Runners in the winter marathon cheered loudly for the woman who wore bib",
    "Every parcel from the Lisbon warehouse carries a label stamped with the code",
)
"""Sentences up to their number, each of its own kind."""


@frozen
class Fact:
    """One fact to be recalled.

    Attributes:
        text: The whole sentence as it stands in the context.
        stem: Token ids to feed after the context, up to the number.
        answer: Token ids of the number.
    """

    text: str
    stem: tuple[int, ...]
    answer: tuple[int, ...]


@frozen
class RetrievalPrompt:
    """A context and what to ask of it.

    Attributes:
        context: Token ids to prefill, exactly as many as were asked for.
        facts: The facts in the order in which they stand in the context.
        copy_cue: Token ids to feed after the context: the beginning of its first passage.
        copy_target: Token ids of the rest of that passage.
    """

    context: tuple[int, ...]
    facts: tuple[Fact, ...]
    copy_cue: tuple[int, ...]
    copy_target: tuple[int, ...]


def build_retrieval_prompt(tokenizer: Any, tokens: int, seed: int = 0) -> RetrievalPrompt:
    """Build a retrieval test of a given length.

    The same arguments give the same test under one version of Python, whose language reference
    is the prose.

    Args:
        tokenizer: A tokenizer as ``mlx_lm.load`` returns it.
        tokens: Length of the context in tokens.
        seed: Chooses the numbers, the order of the facts and the prose.

    Raises:
        ConfigError: ``tokens`` leaves no room for the passage and the facts, or asks for more
            than the prose there is.
    """
    chance = random.Random(seed)
    facts = [_fact(tokenizer, stem, chance) for stem in chance.sample(STEMS, len(STEMS))]
    stop = tuple(encode(tokenizer, "." + BREAK))
    sentences = [fact.stem + fact.answer + stop for fact in facts]
    prose = _prose(tokenizer, chance)
    passage, filler = prose[:PASSAGE_TOKENS], prose[PASSAGE_TOKENS:]
    context = list(tokenizer.encode(""))  # the model's own first token, where it has one

    least = len(context) + PASSAGE_TOKENS + sum(map(len, sentences))
    room = tokens - least
    if not 0 <= room <= len(filler):
        raise ConfigError(
            f"retrieval: tokens must be from {least} to {least + len(filler)} (got {tokens})"
        )
    context += passage
    for index, sentence in enumerate(sentences):
        cut, end = (room * i // len(sentences) for i in (index, index + 1))
        context += [*filler[cut:end], *sentence]
    return RetrievalPrompt(
        context=tuple(context),
        facts=tuple(facts),
        copy_cue=(*encode(tokenizer, BREAK), *passage[:CUE_TOKENS]),
        copy_target=tuple(passage[CUE_TOKENS:]),
    )


def _fact(tokenizer: Any, stem: str, chance: random.Random) -> Fact:
    """Draw a fact's number and encode its parts.

    Stem and number are encoded apart, so that context and probe hold the same tokens whatever the
    tokenizer merges. A space that is a token of its own belongs to the stem.
    """
    number = str(chance.randrange(1_000, 10_000))
    head = encode(tokenizer, BREAK + stem)
    answer = encode(tokenizer, f" {number}")
    while not tokenizer.decode(answer[:1]).strip():
        head.append(answer.pop(0))
    return Fact(f"{stem} {number}.", tuple(head), tuple(answer))


def _prose(tokenizer: Any, chance: random.Random) -> list[int]:
    """Draw where the prose begins: of some places, the one with the most varied passage.

    Where a passage repeats itself, several continuations are right and copying it measures the
    model's luck.
    """
    text = load_text("prose-eval").content
    paragraphs = [encode(tokenizer, part + BREAK) for part in text.split(BREAK)]

    def turned(start: int) -> list[int]:
        return list(chain.from_iterable(paragraphs[start:] + paragraphs[:start]))

    starts = chance.sample(range(len(paragraphs)), CANDIDATES)
    return max((turned(start) for start in starts), key=lambda ids: len(set(ids[:PASSAGE_TOKENS])))
