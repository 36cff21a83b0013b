"""Drafts of a second model: read as if they came one by one, and taken back without a trace.

Any short chunk may be such. Its tokens are held as they came until the next chunk, or until
anything looks at the cache: those that are taken back before have made no block old. Where a block
grows old within the chunk, the tokens behind that place read its codes, as they would if each came
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import define

from kvcompress.attention.masks import Mask
from kvcompress.attention.queries import check_queries
from kvcompress.cache.step import Asked, Step
from kvcompress.stages.windowed import WindowedRope

if TYPE_CHECKING:
    from kvcompress.cache.kvcache import CompressedKVCache

LONGEST: Final = 16
"""Tokens of the longest chunk that may be drafts."""


@define(eq=False)
class Drafts:
    """Tokens that may be taken back, and what was asked of them.

    Attributes:
        keys: ``(B, Hkv, L, D)``.
        values: ``(B, Hkv, L, Dv)``.
        asked: What the layer's own attention asked, once it did.
    """

    keys: mx.array
    values: mx.array
    asked: Asked | None = None

    @property
    def length(self) -> int:
        """Tokens."""
        return int(self.keys.shape[2])

    def arrays(self) -> Iterator[mx.array]:
        """Every array held."""
        parts: list[object] = [self.keys, self.values]
        if self.asked is not None:
            parts += [self.asked.queries, self.asked.mask, self.asked.sinks]
        yield from (part for part in parts if isinstance(part, mx.array))

    def without_last(self, count: int) -> Drafts | None:
        """What is left when ``count`` tokens are taken back; ``None`` if nothing is."""
        kept = self.length - count
        if kept <= 0:
            return None
        asked = None if self.asked is None else self.asked.without_last(count)
        return Drafts(self.keys[:, :, :kept], self.values[:, :, :kept], asked)

    def append_to(self, cache: CompressedKVCache) -> None:
        """Add the tokens for good, with what they received."""
        step = cache.append(self.keys, self.values)
        if self.asked is not None:
            step.testify(self.asked)


class DraftStep(Step):
    """What the tokens of a short chunk attend to: as one step, or part by part.

    Args:
        tokens: As for a step in which no block grows old.
        cache: A copy of the cache before the chunk, for this step's use.
        drafts: The chunk.
    """

    def __init__(self, *tokens: Any, cache: CompressedKVCache, drafts: Drafts) -> None:
        super().__init__(*tokens)
        self._cache = cache
        self._drafts = drafts

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As :meth:`kvcompress.cache.step.Step.attend`, one by one where that reads otherwise."""
        check_queries(self._codec.layer, self._keys.shape[0], queries, sinks)
        own = queries.shape[2] == self._drafts.length
        parts = self._parts() if own and isinstance(mask, str) and mask == "causal" else []
        if len(parts) > 1:
            out = self._one_by_one(parts, queries, scale, sinks)
        else:
            out = super().attend(queries, scale=scale, mask=mask, sinks=sinks)
        if own and self._drafts.asked is None:
            self._drafts.asked = Asked(queries, scale, mask, sinks)
        return out

    def _one_by_one(
        self, parts: list[slice], queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        cache, out = copy.deepcopy(self._cache), []
        for part in parts:
            step = cache.append(self._drafts.keys[:, :, part], self._drafts.values[:, :, part])
            few = queries[:, :, part]
            mask = "causal" if few.shape[2] > 1 else None
            out.append(step.attend(few, scale=scale, mask=mask, sinks=sinks))
        return mx.concatenate(out, axis=2)

    def _parts(self) -> list[slice]:
        """The chunk cut where a token that came alone would find more tokens coded.

        Before every token that reads codes, where each chooses what it reads or cuts the past into
        bands of its own.
        """
        codec, length = self._cache.codec, self._drafts.length
        apart = codec.attend_fraction < 1 or isinstance(codec.rope, WindowedRope)
        coded = [self._cache.coded_after(count) for count in range(length)]
        cuts = [i for i in range(1, length) if coded[i] > coded[i - 1] or (apart and coded[i])]
        return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
