"""A batch of sequences of different lengths: a list of single caches, no padding stored.

mlx-lm pads a batch to a rectangle; here each row keeps its own cache, so rows cannot meet, and
the codes of one row never depend on another. The price is one set of launches a row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import mlx.core as mx
import numpy as np

from kvcompress.cache.batch_step import BatchStep, GeometryMask, RowPlace
from kvcompress.cache.chunk import check_chunk
from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.step import Step
from kvcompress.cache.view import View, views
from kvcompress.config.option import shown
from kvcompress.errors import BatchError, CacheFileError


class CompressedBatchCache:
    """The rows of a batch, each a :class:`CompressedKVCache`, under mlx-lm's batch protocol.

    Args:
        rows: Single-sequence caches of one method and layer; owned from now on.

    Raises:
        BatchError: Where they do not fit together.
    """

    def __init__(self, rows: Sequence[CompressedKVCache]) -> None:
        self.rows = list(rows)
        self._before = [0] * len(self.rows)  # padding still to come before a row's tokens
        self._left: list[int] | None = None  # tokens still to come of right-padded rows
        self._step: BatchStep | None = None  # kept while a step lasts, for layers that share it
        for row in self.rows:
            _check_row(self.rows[0], row)

    @classmethod
    def merge(cls, caches: Sequence[CompressedKVCache]) -> CompressedBatchCache:
        """A batch of copies of single caches."""
        for cache in caches:
            if not isinstance(cache, CompressedKVCache):
                raise BatchError(
                    f"merge: every cache must be compressed by the same method "
                    f"(got a {type(cache).__name__})"
                )
        return cls([copy.deepcopy(cache) for cache in caches])

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, ``(B,)``; negative over left padding."""
        return mx.array(
            [row.offset - before for row, before in zip(self.rows, self._before, strict=True)]
        )

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce the padding of the chunks that follow.

        Args:
            left_padding: Padding before each row's first token.
            lengths: Tokens of each row in what follows.
            right_padding: Padding after them.

        Raises:
            BatchError: There is not one count a row, one is negative, or they come too late.
        """
        left_padding, lengths, right_padding = map(
            self._counts, (left_padding, lengths, right_padding)
        )
        if left_padding is not None:
            if not self.empty():
                raise BatchError("left padding can only be announced to an empty batch")
            self._before = [b + p for b, p in zip(self._before, left_padding, strict=True)]
        if right_padding is not None and any(right_padding):
            if lengths is None:
                raise BatchError("right padding needs the rows' lengths")
            self._left = lengths

    def _counts(self, given: Any) -> list[int] | None:
        """One number a row, from a list or an array of them."""
        if given is None:
            return None
        numbers = given.tolist() if hasattr(given, "tolist") else given
        listed = list(numbers) if isinstance(numbers, Sequence) else []
        whole = all(isinstance(n, Integral) and not isinstance(n, bool) for n in listed)
        if not whole or len(listed) != len(self.rows) or min(listed, default=0) < 0:
            raise BatchError(
                f"padding and lengths must be {len(self.rows)} integers of at least 0, one a row "
                f"(got {shown(given)})"
            )
        return listed

    def finalize(self) -> None:
        """End right padding; nothing was stored for it."""
        self._left = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        """Add a padded chunk, ``(B, Hkv, L, D)`` and ``(B, Hkv, L, Dv)``; two lazy views.

        Raises:
            BatchError: The chunk has another number of rows.
            ConfigError: It does not fit the layer; no row has taken its part then.
        """
        if not self.rows:
            raise BatchError("the batch has no rows left")
        check_chunk(self.rows[0].method.name, self.rows[0].layer, 0, keys, values)
        if keys.shape[0] != len(self.rows):
            raise BatchError(f"the batch has {len(self.rows)} rows (got {keys.shape[0]})")
        length, width = keys.shape[2], self.size()
        steps: list[Step | None] = []
        places: list[RowPlace] = []
        for i, row in enumerate(self.rows):
            skip = min(self._before[i], length)
            take = length - skip if self._left is None else min(length - skip, self._left[i])
            self._before[i] -= skip
            if self._left is not None:
                self._left[i] -= take
            start = width - row.offset if row.offset else width + skip
            part = (slice(i, i + 1), slice(None), slice(skip, skip + take))
            if take:
                steps.append(row.advance(keys[part], values[part]))
            else:
                steps.append(None if row.empty() else row.now())
            places.append(RowPlace(skip, take, start, start + row.offset))
        step = BatchStep(steps, places, length, self.rows[0].layer)
        self._step = step if self.rows[0].shared else None
        return views(*step.dense, step)

    def keys_and_values(self) -> tuple[View, View]:
        """What this step's own layer attends to, for the layers that share its cache.

        Raises:
            BatchError: Between steps, or where no other layer reads this cache.
        """
        if self._step is None:
            raise BatchError("a batch can be read by other layers only within a step")
        return views(*self._step.dense, self._step)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> GeometryMask:
        """The causal mask of the padded rectangle, ``(B, 1, N, W)``, lazily."""
        from mlx_lm.models.base import create_causal_mask

        width = self.size()
        padding = mx.array(
            [width - r.offset + b for r, b in zip(self.rows, self._before, strict=True)]
        )
        mask = GeometryMask(
            create_causal_mask(N, offset=width, left_padding=padding, window_size=window_size)
        )
        mask.window_size = window_size
        return mask

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows, in this order; one that is named again goes on as a copy.

        Raises:
            BatchError: There is no such row.
        """
        keep = [self._place_of(index) for index in np.asarray(batch_indices).reshape(-1).tolist()]
        self._step = None
        self.rows = _distinct([], [self.rows[i] for i in keep])
        self._before = [self._before[i] for i in keep]
        self._left = None if self._left is None else [self._left[i] for i in keep]

    def extend(self, other: CompressedBatchCache) -> None:
        """Add the rows of another batch, which are no longer its own.

        Raises:
            BatchError: They do not fit, or one of the two is amid right padding.
        """
        if not isinstance(other, CompressedBatchCache):
            raise BatchError(f"a compressed batch cannot take in a {type(other).__name__}")
        for row in other.rows:
            _check_row(self.rows[0] if self.rows else row, row)
        if self._left is not None or other._left is not None:
            raise BatchError("right padding must be finalized before rows are added")
        self._step = None
        self.rows = _distinct(self.rows, other.rows)
        self._before = self._before + other._before

    def extract(self, idx: int) -> CompressedKVCache:
        """A snapshot of one row, as if it had run alone, without room for tokens to come.

        Raises:
            BatchError: There is no such row.
        """
        row = copy.deepcopy(self.rows[self._place_of(idx)])
        row.compact()
        return row

    def _place_of(self, index: Any) -> int:
        """A row's place from its number, which may count from the end as in Python."""
        rows = len(self.rows)
        whole = isinstance(index, Integral) and not isinstance(index, bool)
        if not whole or not -rows <= index < rows:
            raise BatchError(
                f"the batch has {rows} rows (got {shown(index)} for the number of one)"
            )
        return int(index) % rows

    def size(self) -> int:
        """Tokens of the longest row."""
        return max((row.offset for row in self.rows), default=0)

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return all(row.empty() for row in self.rows)

    def is_trimmable(self) -> bool:
        """Tokens can always be taken back."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens of every row; returns how many the longest lost."""
        self._step = None
        return max((row.trim(n) for row in self.rows), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    @property
    def state(self) -> tuple[Any, ...]:
        """The states of the rows."""
        self._step = None  # mlx-lm reads the state when a step is over
        return tuple(row.state for row in self.rows)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        if len(_rows_of(state)) != len(self.rows):
            raise CacheFileError(f"the state must have {len(self.rows)} rows (got {len(state)})")
        read = copy.deepcopy(self.rows)  # a row that is refused must not leave others changed
        for row, part in zip(read, state, strict=True):
            row.state = part
        self.rows, self._before, self._left, self._step = read, [0] * len(read), None, None

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> CompressedBatchCache:
        """A batch that goes on where ``state`` was taken.

        Raises:
            CacheFileError: It is none of a batch.
        """
        return cls([CompressedKVCache.from_state(part) for part in _rows_of(state)])


def _rows_of(state: object) -> tuple[Any, ...]:
    if not isinstance(state, tuple | list):
        raise CacheFileError(f"the state must be one of a batch (got a {type(state).__name__})")
    return tuple(state)


def _distinct(
    rows: list[CompressedKVCache], more: Sequence[CompressedKVCache]
) -> list[CompressedKVCache]:
    """Rows and more of them, with a copy in the place of one that is there already."""
    out = list(rows)
    for row in more:
        out.append(copy.deepcopy(row) if any(row is other for other in out) else row)
    return out


def _check_row(first: CompressedKVCache, row: CompressedKVCache) -> None:
    if row.batch > 1:
        raise BatchError(f"a row of a batch must be one sequence (got {row.batch})")
    if row.layer != first.layer or row.method.fingerprint != first.method.fingerprint:
        raise BatchError(
            f"rows of a batch must share method, configuration and layer "
            f"(got {first!r} and {row!r})"
        )
