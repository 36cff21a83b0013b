"""A cache that one thread looks at, or trims, goes on in another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from kvcompress import get_method
from kvcompress.cache import CompressedKVCache
from tests.stand_ins import LAYER, cache, largest, tokens

LOOKS: dict[str, Callable[[CompressedKVCache], Any]] = {
    "nbytes": lambda c: c.nbytes,
    "report": lambda c: c.report,
    "reserved bytes": lambda c: c.reserved_bytes,
    "state": lambda c: c.state,
    "batch": lambda c: c.batch,
    "what is next": lambda c: c.now(),
    "a trim": lambda c: c.trim(3),
    "a long trim": lambda c: c.trim(20),
}


def elsewhere(act: Callable[[], Any]) -> None:
    """Do it in a thread of its own, to its end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def judging() -> CompressedKVCache:
    """A cache whose tokens are judged by what they receive."""
    method = get_method("a2ats", codebook="random", window=16, block=16)
    return CompressedKVCache(method, LAYER, method.bind(LAYER))


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("last", [1, 6])
@pytest.mark.parametrize("made", [lambda: cache(window=16, warmup=12), judging])
def test_it_goes_on_where_it_was(
    look: str, last: int, made: Callable[[], CompressedKVCache]
) -> None:
    q, k, v = tokens(110)
    here, there = made(), made()
    for held in (here, there):
        for part in (slice(0, 93), slice(93, 93 + last)):
            keys, _ = held.update_and_fetch(k[:, :, part], v[:, :, part])
            mx.eval(keys.step.attend(q[:, :, part], scale=0.2, mask="causal"))
    LOOKS[look](here)
    elsewhere(lambda: LOOKS[look](there))
    outs = []
    for held in (here, there):
        keys, _ = held.update_and_fetch(k[:, :, 99:], v[:, :, 99:])
        outs.append(keys.step.attend(q[:, :, 99:], scale=0.2, mask="causal"))
    assert here.offset == there.offset
    assert largest(outs[0] - outs[1]) == 0
