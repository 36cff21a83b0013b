"""What a comparison runs: how much is read through the cache, and how much of it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
from attrs import field, frozen

from kvcompress.errors import ConfigError

LONGEST_PROBE: Final = 256
"""Tokens that a question of the retrieval test goes on for, at most: the copied passage."""


def _at_least(least: int) -> attrs._ValidatorType[int]:
    def check(protocol: object, attribute: attrs.Attribute[int], value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"protocol: {attribute.name} must be an integer of at least {least} (got {value!r})"
            )

    return check


@frozen(kw_only=True)
class Protocol:
    """One way of measuring, the same for every method of a comparison.

    A window of text is read as a chat reads its history: the context in chunks through the cache,
    then the continuation a few tokens at a time, so that what is scored attends to coded tokens.

    Attributes:
        name: What reports call it.
        context: Tokens read before the first scored one.
        windows: Separate stretches of text, spread evenly over it.
        scored: Tokens scored in each window.
        step: Tokens scored at a time. Attention inside a step is exact, so keep it well below the
            windows of recent tokens that methods keep exact anyway.
        chunk: Tokens read at a time before scoring.
        retrieval: Tokens of the retrieval prompt; 0 leaves that test out.
        decode: Single-token steps that are timed; 0 leaves that out.
    """

    name: str
    context: int = field(validator=_at_least(2))
    windows: int = field(validator=_at_least(1))
    scored: int = field(validator=_at_least(1))
    step: int = field(default=32, validator=_at_least(1))
    chunk: int = field(default=512, validator=_at_least(1))
    retrieval: int = field(default=0, validator=_at_least(0))
    decode: int = field(default=12, validator=_at_least(0))

    @property
    def window_tokens(self) -> int:
        """Tokens of text that one window takes."""
        return self.context + self.scored

    @property
    def longest(self) -> int:
        """Positions that the model must be able to number."""
        return max(self.window_tokens + self.decode, self.retrieval + LONGEST_PROBE)

    def take_windows(self, ids: Sequence[int], prefix: Sequence[int] = ()) -> list[list[int]]:
        """Cut the windows out of a text.

        Args:
            ids: The text's tokens.
            prefix: Tokens that every sequence of this model starts with.

        Returns:
            ``windows`` lists of ``context + scored`` tokens, the prefix among them.

        Raises:
            ConfigError: The text is too short for one window after another without overlap.
        """
        need = self.window_tokens - len(prefix)
        if len(ids) < need * self.windows:
            raise ConfigError(
                f"protocol {self.name}: {self.windows} windows of {self.context} + {self.scored} "
                f"tokens need {need * self.windows} tokens of text (the text has {len(ids)}); "
                f"give a longer text with --text or a shorter --context"
            )
        free = len(ids) - need
        starts = [free * i // max(self.windows - 1, 1) for i in range(self.windows)]
        return [[*prefix, *ids[start : start + need]] for start in starts]


QUICK: Final = Protocol(name="quick", context=1024, windows=1, scored=512, retrieval=1024)
"""One stretch of text and a short look-up test: enough to tell methods apart."""

STANDARD: Final = Protocol(name="standard", context=1024, windows=6, scored=256, retrieval=2048)
"""Some minutes a method: six stretches of text, for numbers to quote."""

LONG: Final = Protocol(name="long", context=4096, windows=2, scored=768, retrieval=4096)
"""Two stretches far longer than any window: what far tokens are worth."""

PROTOCOLS: Final = {protocol.name: protocol for protocol in (QUICK, STANDARD, LONG)}
"""Every protocol by name."""
