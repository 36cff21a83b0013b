"""Full precision's log-probabilities on disk: the first row writes them, the others read them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from attrs import define, field

from kvcompress.compare.metrics import LogProbs


class Reference(Protocol):
    """Log-probabilities of full precision, in the order in which tokens are scored."""

    def rows_for(self, rows: LogProbs) -> LogProbs:
        """Return full precision's rows for the same tokens as a method's next ``rows``."""


@define
class Recording:
    """Full precision's own row: what it predicts is the reference, and goes to a file.

    Attributes:
        path: The file, which grows by ``4 * vocabulary`` bytes a token.
    """

    path: Path

    def __attrs_post_init__(self) -> None:
        self.path.write_bytes(b"")

    def rows_for(self, rows: LogProbs) -> LogProbs:
        """Write ``rows`` down and return them."""
        with self.path.open("ab") as file:
            file.write(np.ascontiguousarray(rows, dtype=np.float32).data)
        return rows


@define
class Playback:
    """Another method's row: reads what :class:`Recording` wrote, a step at a time.

    Attributes:
        path: The file.
    """

    path: Path
    _done: int = field(default=0, init=False)

    def rows_for(self, rows: LogProbs) -> LogProbs:
        """Return the next ``len(rows)`` recorded rows."""
        stored = np.memmap(self.path, dtype=np.float32, mode="r").reshape(-1, rows.shape[1])
        start, self._done = self._done, self._done + len(rows)
        return np.asarray(stored[start : self._done])
