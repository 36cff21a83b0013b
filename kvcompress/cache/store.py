"""Where a sequence's tokens live: sealed blocks of codes, a small tail, and exact rows.

Appending writes in place, never copies the past, and leaves earlier views valid: every buffer
is replaced by ``mx.slice_update``, which MLX carries out in place when nobody else holds it.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
from attrs import define, field

from kvcompress.schema import Schema

SEAL = 4096  # tokens of a sealed block
STEP = 256  # growth of the tail, and of exact rows beyond their steady size


def write(buffer: mx.array, rows: mx.array, start: int) -> mx.array:
    """``buffer`` with ``rows`` at ``start`` of the token axis (axis 2)."""
    return mx.slice_update(buffer, rows, mx.array([start]), axes=(2,))


@define(eq=False)
class CodeStore:
    """Codes of one sequence, ``(B, heads, tokens, width)`` a field.

    Attributes:
        schema: What is stored for a token.
        sealed: Full blocks of ``SEAL`` tokens, never written again.
        tail: The block being filled, with room for the next tokens; empty before the first.
        used: Tokens of the tail that are codes.
    """

    schema: Schema
    sealed: list[dict[str, mx.array]] = field(factory=list)
    tail: dict[str, mx.array] = field(factory=dict)
    used: int = 0

    @property
    def tokens(self) -> int:
        """Coded tokens."""
        return len(self.sealed) * SEAL + self.used

    @property
    def capacity(self) -> int:
        """Tokens the tail has room for."""
        return next(iter(self.tail.values())).shape[2] if self.tail else 0

    def arrays(self, since: int = 0) -> Iterator[mx.array]:
        """Every array held, but for the first ``since`` sealed blocks."""
        for block in (*self.sealed[since:], self.tail):
            yield from block.values()

    def append(self, codes: dict[str, mx.array], count: int) -> None:
        """Add the codes of ``count`` tokens."""
        start = 0
        while start < count:
            take = min(count - start, SEAL - self.used)
            whole = take == count
            part = codes if whole else {k: a[:, :, start : start + take] for k, a in codes.items()}
            self._fill(part, take)
            start += take

    def _fill(self, part: dict[str, mx.array], count: int) -> None:
        self._reserve(part, self.used + count)
        self.tail = {k: write(self.tail[k], part[k], self.used) for k in self.tail}
        self.used += count
        if self.used == SEAL:
            self.sealed.append(self.tail)
            self.tail, self.used = {}, 0

    def _reserve(self, like: dict[str, mx.array], tokens: int) -> None:
        """Grow the tail, in steps, to hold ``tokens``."""
        if tokens <= self.capacity:
            return
        batch = next(iter(like.values())).shape[0]
        self._hold(min(SEAL, -(-tokens // STEP) * STEP), batch)

    def _hold(self, room: int, batch: int) -> None:
        fresh = {f.name: f.allocate(batch, room) for f in self.schema.fields}
        if self.used:
            fresh = {k: write(a, self.tail[k][:, :, : self.used], 0) for k, a in fresh.items()}
        self.tail = fresh

    def blocks(self) -> Iterator[tuple[dict[str, mx.array], int]]:
        """The codes as they stand, with the number of tokens of each run."""
        for block in self.sealed:
            yield block, SEAL
        if self.used:
            yield {k: a[:, :, : self.used] for k, a in self.tail.items()}, self.used

    def keep(self, tokens: int) -> None:
        """Forget all but the first ``tokens``."""
        full, rest = divmod(tokens, SEAL)
        if full < len(self.sealed):
            self.tail = self.sealed[full] if rest else {}
        self.sealed = self.sealed[:full]
        self.used = rest
        if not rest:
            self.tail = {}

    def without_room(self) -> CodeStore:
        """The same codes without room for tokens to come; sealed blocks are shared."""
        fresh = CodeStore(self.schema, list(self.sealed), self.tail, self.used)
        if self.capacity > self.used:
            fresh._hold(self.used, next(iter(self.tail.values())).shape[0])
        return fresh

    def copy(self) -> CodeStore:
        """An independent store that shares memory until one of the two writes."""
        tail = {k: a[...] for k, a in self.tail.items()}
        return CodeStore(self.schema, list(self.sealed), tail, self.used)


@define(eq=False)
class ExactRows:
    """Keys and values kept as they came, ``(B, H, used, D)``: sinks first, then recent ones.

    Attributes:
        keys: The keys' buffer, with room for the next tokens.
        values: The values' buffer.
        used: Rows of the buffers that are tokens.
        received: ``(B, 1, used, 1)`` float32, the attention that each row has received, without
            room; ``None`` where that is of no account.
    """

    keys: mx.array | None = None
    values: mx.array | None = None
    used: int = 0
    received: mx.array | None = None

    def arrays(self) -> Iterator[mx.array]:
        """Every array held."""
        parts = (self.keys, self.values, self.received)
        yield from (part for part in parts if part is not None)

    def rows(self) -> tuple[mx.array, mx.array]:
        """The rows as they stand; there must be some."""
        if self.keys is None or self.values is None:
            raise RuntimeError("no exact rows are held")
        if self.used == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def append(self, keys: mx.array, values: mx.array, steady: int) -> None:
        """Add rows in place; room grows to ``steady`` at once when they are few, else in steps."""
        total = self.used + keys.shape[2]
        if self.keys is None or total > self.keys.shape[2]:
            self._grow(keys, values, _room(total, steady))
        if self.keys is not None and self.values is not None:
            self.keys = write(self.keys, keys, self.used)
            self.values = write(self.values, values, self.used)
        self.used = total

    def _grow(self, keys: mx.array, values: mx.array, room: int) -> None:
        fresh_keys = mx.zeros((*keys.shape[:2], room, keys.shape[3]), keys.dtype)
        fresh_values = mx.zeros((*values.shape[:2], room, values.shape[3]), values.dtype)
        if self.used:
            old_keys, old_values = self.rows()
            fresh_keys = write(fresh_keys, old_keys, 0)
            fresh_values = write(fresh_values, old_values, 0)
        self.keys, self.values = fresh_keys, fresh_values

    def replace(self, keys: mx.array, values: mx.array, steady: int) -> None:
        """Hold these rows alone, in buffers of their own."""
        self.keys, self.values, self.used = None, None, 0
        self.append(keys, values, steady)

    def without_room(self) -> ExactRows:
        """The same rows in buffers of their own, without room for tokens to come."""
        fresh = ExactRows()
        if self.used:
            fresh.append(*self.rows(), self.used)
            fresh.received = self.received
        return fresh

    def forget(self, count: int) -> None:
        """Let go of the last ``count`` rows."""
        self.used -= count
        if self.received is not None:
            self.received = self.received[:, :, : self.used] if self.used else None

    def unjudged(self, batch: int, tokens: int) -> None:
        """Let the rows that make ``tokens`` in all have received nothing yet."""
        old = self.received
        fresh = mx.zeros((batch, 1, tokens - (0 if old is None else old.shape[2]), 1))
        self.received = fresh if old is None else mx.concatenate([old, fresh], axis=2)

    def copy(self) -> ExactRows:
        """Independent rows that share memory until one of the two writes."""
        if self.keys is None or self.values is None:
            return ExactRows()
        return ExactRows(self.keys[...], self.values[...], self.used, self.received)


def _room(total: int, steady: int) -> int:
    """Tokens to make room for: up to the steady size in one go where it is small."""
    stepped = -(-total // STEP) * STEP
    if total <= steady:
        return min(stepped, steady)
    return stepped
