"""What a layer's cache holds, in tokens and bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import mlx.core as mx

from kvcompress.cache.drafts import Drafts
from kvcompress.cache.received import retrieved
from kvcompress.cache.store import CodeStore, ExactRows
from kvcompress.codec import KVCodec

if TYPE_CHECKING:
    from kvcompress.method import CompressionMethod


class Figures(ABC):
    """The numbers of a cache, told from what it holds once it has come to rest."""

    method: CompressionMethod
    codec: KVCodec
    offset: int
    exact: ExactRows
    store: CodeStore
    constants: dict[str, mx.array]
    _drafts: Drafts | None  # not yet added: they may be taken back
    _due: tuple[mx.array, mx.array, int] | None  # to code once queries were seen

    @abstractmethod
    def coded_at(self, seen: int) -> int:
        """Tokens that are coded once ``seen`` tokens have been seen."""

    @abstractmethod
    def come_to_rest(self) -> None:
        """Add and code what waits, and compute what that makes."""

    @property
    def _block(self) -> int:
        return self.method.block if self.method.window > 0 else 1

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def empty(self) -> bool:
        """Whether no token was seen."""
        return self.offset == 0

    @property
    def tokens_coded(self) -> int:
        """Tokens held as codes."""
        held = self.store.tokens if self._due is None else self._due[2]
        return held if self._drafts is None else max(held, self.coded_at(self.offset))

    @property
    def tokens_retrieved(self) -> int:
        """Of these, those that got the more careful of two assignments."""
        if self.codec.keys.careful is None:
            return 0
        return retrieved(self.tokens_coded, self._block, self.codec.careful_fraction)

    @property
    def batch(self) -> int:
        """Rows held, ``B``; 0 before the first chunk."""
        if self._drafts is not None:
            return int(self._drafts.keys.shape[0])
        first = self._due[0] if self._due is not None else next(self._held(), None)
        return 0 if first is None else int(first.shape[0])

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the room that is held for tokens to come."""
        self.come_to_rest()
        held = [(a, self.exact.used) for a in self.exact.arrays()]
        held += [(a, self.store.used) for a in self.store.tail.values()]
        return sum(int(a.nbytes) // a.shape[2] * (a.shape[2] - used) for a, used in held if a.size)

    @property
    def nbytes(self) -> int:
        """Bytes of every array of this sequence, room to grow included; no shared tables."""
        return sum(int(a.nbytes) for a in self._arrays())

    def _arrays(self) -> Iterator[mx.array]:
        self.come_to_rest()
        return self._held()

    def _held(self) -> Iterator[mx.array]:
        yield from self.exact.arrays()
        yield from self.store.arrays()
        yield from self.constants.values()
