"""Which tokens of the windows are kept as a sample: chosen by a hash, before the pass.

The choice depends on the seed and on a token's place in the text alone, so it is the same for
every layer and however the text is fed; and what the recorder holds is bounded beforehand.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcompress.stages.hashing import hashed

Rows = NDArray[np.intp]


def choose_rows(lengths: list[int], limit: int, *, skip: int, seed: int) -> list[Rows]:
    """Choose at most ``limit`` tokens evenly at random.

    Args:
        lengths: Tokens of each window.
        limit: How many to choose.
        skip: First tokens of each window that are never chosen.
        seed: Another seed chooses others.

    Returns:
        For each window the chosen positions in order.
    """
    owners = np.repeat(np.arange(len(lengths)), [max(n - skip, 0) for n in lengths])
    places = np.concatenate([np.arange(skip, n) for n in lengths if n > skip] or [owners])
    ranks = np.argsort(hashed(len(places), "calibration", seed), kind="stable")
    chosen = np.sort(ranks[:limit])
    return [places[chosen[owners[chosen] == window]] for window in range(len(lengths))]
