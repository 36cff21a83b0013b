from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.compare.protocol import PROTOCOLS, QUICK, STANDARD, Protocol
from kvcompress.errors import ConfigError


def test_the_standard_protocol_scores_enough_for_its_standard_error() -> None:
    assert STANDARD.windows * STANDARD.scored >= 1500
    assert STANDARD.context >= 1024
    assert STANDARD.retrieval == 2048


def test_scored_tokens_attend_to_coded_ones() -> None:
    default_window = 128
    for protocol in PROTOCOLS.values():
        assert protocol.step <= 32
        assert protocol.context > 4 * default_window


@pytest.mark.parametrize("name", ["context", "windows", "scored", "step", "chunk"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_a_number_that_makes_no_sense_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"protocol: {name} must be an integer of at least"):
        attrs.evolve(QUICK, **{name: value})


@given(
    context=st.integers(2, 40),
    scored=st.integers(1, 40),
    windows=st.integers(1, 5),
    spare=st.integers(0, 200),
    prefix=st.lists(st.just(-1), max_size=2),
)
def test_windows_are_full_disjoint_pieces_of_the_text(
    context: int, scored: int, windows: int, spare: int, prefix: list[int]
) -> None:
    protocol = Protocol(name="p", context=context, windows=windows, scored=scored)
    ids = range(windows * (context + scored) + spare)
    taken = protocol.take_windows(ids, prefix)
    assert len(taken) == windows
    pieces = [window[len(prefix) :] for window in taken]
    for window, piece in zip(taken, pieces, strict=True):
        assert len(window) == context + scored
        assert window[: len(prefix)] == prefix
        assert piece == list(range(piece[0], piece[0] + len(piece)))
    flat = [token for piece in pieces for token in piece]
    assert len(set(flat)) == len(flat)


def test_a_short_text_is_refused_with_both_numbers() -> None:
    protocol = Protocol(name="p", context=100, windows=2, scored=20)
    with pytest.raises(ConfigError, match=r"need 240 tokens of text \(the text has 239\)"):
        protocol.take_windows(range(239))
    assert protocol.take_windows(range(240))
