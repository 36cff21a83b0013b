from __future__ import annotations

import base64
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from kvcompress.calibrate.windows import source_of, text_windows
from kvcompress.errors import ConfigError
from kvcompress.text import Text
from tests.calibrate.fakes import PROSE, ByteTokenizer

COUNTED = Text("counted", " ".join(f"{n:x}" for n in range(3000)))
IDS = list(COUNTED.content.encode())


def test_a_short_text_is_read_whole() -> None:
    windows = text_windows(ByteTokenizer(), Text("t", PROSE[:1000]), tokens=5000, size=300)
    assert [len(window) for window in windows] == [300, 300, 300, 100]
    assert bytes(itertools.chain(*windows)) == PROSE[:1000].encode()


def test_a_long_text_is_read_at_evenly_spread_places() -> None:
    windows = text_windows(ByteTokenizer(), COUNTED, tokens=1000, size=250)
    assert [len(window) for window in windows] == [250] * 4
    starts = [bytes(IDS).index(bytes(window)) for window in windows]
    assert starts[0] == 0
    assert np.ptp(np.diff(starts)) <= 250
    assert starts[-1] >= len(IDS) * 0.7


@pytest.mark.parametrize("tokens", [64, 100, 256, 300, 900, 4000])
def test_never_more_tokens_than_asked_for_and_nearly_as_many(tokens: int) -> None:
    windows = text_windows(ByteTokenizer(first=1), COUNTED, tokens=tokens, size=256)
    read = sum(map(len, windows))
    assert tokens - 64 < read <= tokens
    assert all(64 <= len(window) <= 256 for window in windows)
    assert all(window[0] == 1 for window in windows)


@pytest.mark.parametrize("tokens", [0, 63, -5, True, 1024.0, "1024", None])
def test_illegal_numbers_of_tokens(tokens: object) -> None:
    with pytest.raises(ConfigError, match="tokens must be an integer of at least 64"):
        text_windows(ByteTokenizer(), COUNTED, tokens)  # type: ignore[arg-type]


def test_too_short_and_too_uniform_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 30 tokens; calibration needs at least 64"):
        text_windows(ByteTokenizer(), Text("t", PROSE[:30]), 1000)
    with pytest.raises(ConfigError, match="only 2 different tokens"):
        text_windows(ByteTokenizer(), Text("t", "ab" * 500), 1000)


def test_texts_are_named_given_or_read(tmp_path: Path) -> None:
    file = tmp_path / "a file.txt"
    file.write_text("what the file holds")
    assert source_of(COUNTED) is COUNTED
    assert source_of(file).content == "what the file holds"
    assert source_of(str(file)).content == "what the file holds"
    assert source_of("prose-calibration").name == "prose-calibration"
    assert source_of(PROSE).content == PROSE
    assert source_of("two words").content == "two words"


@pytest.mark.parametrize("text", ["", "  \n ", Text("t", "\n")])
def test_an_empty_text_is_refused(text: str | Text) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        source_of(text)


def test_no_such_file_is_told() -> None:
    with pytest.raises(ConfigError, match=r"'missing\.txt' is neither a file"):
        source_of("missing.txt")


@pytest.mark.parametrize("data", [np.zeros(5, np.int32), [1, 2, 3], 7, None, b"bytes"])
def test_what_is_no_text_is_refused(data: object) -> None:
    with pytest.raises(ConfigError, match="text must be a string, a path or a Text"):
        source_of(data)  # type: ignore[arg-type]


def test_random_characters_are_refused() -> None:
    noise = base64.b64encode(random.Random(0).randbytes(4000)).decode()
    with pytest.raises(ConfigError, match="looks random"):
        source_of(Text("noise", noise))


@pytest.mark.parametrize("name", ["prose-calibration", "code-calibration"])
def test_the_built_in_texts_do_not_look_random(name: str) -> None:
    source_of(name)
