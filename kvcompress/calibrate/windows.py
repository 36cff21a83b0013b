"""From a text to windows of token ids, and what is not fit to calibrate on."""

from __future__ import annotations

import zlib
from os import PathLike
from pathlib import Path
from typing import Any, Final

from kvcompress.config.option import shown
from kvcompress.errors import ConfigError
from kvcompress.files import is_file, is_folder, user_path
from kvcompress.text import Text, encode, load_text

WINDOW: Final = 1024  # tokens; longer ones cost attention and add little
LEAST_TOKENS: Final = 64
LEAST_DISTINCT: Final = 16

_ENOUGH_CHARACTERS = 2048
_RANDOM = 0.7  # prose packs to 0.3 to 0.5 of its bytes, code to less, base64 noise to 0.76


def source_of(text: str | PathLike[str] | Text) -> Text:
    """The text to calibrate on.

    Args:
        text: A :class:`~kvcompress.text.Text`; a built-in name or a path; or the text itself,
            which a string with a line break or a space that names no file is taken to be.

    Raises:
        ConfigError: It is of another type, is empty, or looks random.
    """
    if isinstance(text, Text):
        source = text
    elif isinstance(text, PathLike):
        source = load_text(Path(text))
    elif isinstance(text, str):
        source = Text("text", text) if _is_content(text) else load_text(text)
    else:
        raise ConfigError(
            f"calibrate: text must be a string, a path or a Text (got {shown(text)}); tables are "
            f"fitted to what the model makes of real text"
        )
    if not source.content.strip():
        raise ConfigError(f"calibrate: the text {source.name!r} is empty")
    raw = source.content.encode()[: 1 << 20]
    packed = len(zlib.compress(raw)) / len(raw)
    if len(raw) >= _ENOUGH_CHARACTERS and packed > _RANDOM:
        raise ConfigError(
            f"calibrate: the text {source.name!r} looks random (it packs to {packed:.0%} of its "
            f"size, prose to less than 50%); give text like what the model will read"
        )
    return source


def _is_content(text: str) -> bool:
    if "\n" in text or len(text) > 255 or not text.strip():
        return True
    path = user_path(text)
    return " " in text and not (is_file(path) or is_folder(path))


def text_windows(tokenizer: Any, source: Text, tokens: int, size: int = WINDOW) -> list[list[int]]:
    """Windows of token ids spread evenly over a text, together at most ``tokens`` long.

    Each begins with the model's own first token where its tokenizer sets one.

    Raises:
        ConfigError: ``tokens`` is too small, or the text has too few or too uniform tokens.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < LEAST_TOKENS:
        raise ConfigError(
            f"calibrate: tokens must be an integer of at least {LEAST_TOKENS} (got {shown(tokens)})"
        )
    ids = encode(tokenizer, source.content)
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(
            f"calibrate: the text {source.name!r} has {len(ids)} tokens; calibration needs at "
            f"least {LEAST_TOKENS}, and several thousand to be any good: give a longer text"
        )
    first = list(tokenizer.encode(""))
    room = min(size, tokens) - len(first)
    whole = [ids[start : start + room] for start in range(0, len(ids), room)]
    wanted = -(-tokens // (room + len(first)))
    if wanted < len(whole):
        whole = [whole[i * len(whole) // wanted] for i in range(wanted)]
    windows, left = [], tokens
    for piece in whole:
        window = [*first, *piece][:left]
        if len(window) >= LEAST_TOKENS:
            windows.append(window)
            left -= len(window)
    distinct = len({token for window in windows for token in window})
    if distinct < LEAST_DISTINCT:
        raise ConfigError(
            f"calibrate: the text {source.name!r} has only {distinct} different tokens; give "
            f"text like what the model will read"
        )
    return windows
