"""RoPE policies: in which frame keys are coded, and how a query meets the codes.

``PostRope`` codes keys as they arrive. ``PreRope`` turns them back first, so that codes do not
depend on position, and rotates what it decodes. ``kvcompress.stages.windowed`` turns them back too,
but rotates the query instead of the keys.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
from attrs import field, frozen

from kvcompress.layers import Positions, Rotary
from kvcompress.stages.base import Coder, Fields, Transform
from kvcompress.stages.centre import rotated
from kvcompress.stages.products import dots
from kvcompress.stages.waves import Waves


@frozen(eq=False)
class Queries:
    """A step's queries, made ready once for all tiles.

    Attributes:
        raw: ``(B, Hkv, M, D)`` float32, post-RoPE and scaled; ``M = G * L``, positions fastest.
        mapped: The same as the policy reads codes with.
        positions: The ``L`` positions.
    """

    raw: mx.array
    mapped: mx.array
    positions: range
    _waves: list[tuple[mx.array, Waves]] = field(factory=list, init=False, repr=False)

    def waves(self, mean: mx.array, rotary: Rotary) -> Waves:
        """What they make of a sequence's mean, the same for all its tokens: made once."""
        for known, waves in self._waves:
            if known is mean:
                return waves
        waves = Waves.of(self.raw, mean, rotary)
        self._waves.append((mean, waves))
        return waves

    def part(self, first: int, last: int) -> Queries:
        """The queries of the positions with these places, the last not included."""

        def cut(x: mx.array) -> mx.array:
            B, H, _, D = x.shape
            apart = x.reshape(B, H, -1, len(self.positions), D)
            return apart[:, :, :, first:last].reshape(B, H, -1, D)

        return Queries(cut(self.raw), cut(self.mapped), self.positions[first:last])


class RopePolicy(Protocol):
    """Law: ``scores`` equals ``raw . from_code(decode)`` wherever the policy is exact."""

    def to_code(
        self, keys: mx.array, mean: mx.array | None, rotary: Rotary | None, positions: Positions
    ) -> mx.array:
        """Post-RoPE keys ``(B, H, T, D)`` float32 to what the transform takes."""
        ...

    def from_code(
        self, keys: mx.array, mean: mx.array | None, rotary: Rotary | None, positions: Positions
    ) -> mx.array:
        """Undo :meth:`to_code`."""
        ...

    def queries(
        self, raw: mx.array, transform: Transform, rotary: Rotary | None, positions: range
    ) -> Queries:
        """Make queries ready."""
        ...

    def scores(
        self,
        queries: Queries,
        fields: Fields,
        mean: mx.array | None,
        positions: range,
        *,
        coder: Coder,
        transform: Transform,
        rotary: Rotary | None,
    ) -> mx.array:
        """``(B, Hkv, M, T)`` float32 against coded tokens."""
        ...


@frozen
class PostRope:
    """Keys are coded rotated, as they arrive; their mean is subtracted as each bears it."""

    def to_code(
        self, keys: mx.array, mean: mx.array | None, rotary: Rotary | None, positions: Positions
    ) -> mx.array:
        """Subtract the mean, rotated to each position."""
        return keys if mean is None else keys - rotated(mean, rotary, positions)

    def from_code(
        self, keys: mx.array, mean: mx.array | None, rotary: Rotary | None, positions: Positions
    ) -> mx.array:
        """Add the mean, rotated to each position."""
        return keys if mean is None else keys + rotated(mean, rotary, positions)

    def queries(
        self, raw: mx.array, transform: Transform, rotary: Rotary | None, positions: range
    ) -> Queries:
        """Through the transform's dual."""
        return Queries(raw, transform.query(raw), positions)

    def scores(
        self,
        queries: Queries,
        fields: Fields,
        mean: mx.array | None,
        positions: range,
        *,
        coder: Coder,
        transform: Transform,
        rotary: Rotary | None,
    ) -> mx.array:
        """From the codes directly, and the mean's part by one product with shared phases."""
        scores = coder.scores(queries.mapped, fields)
        if mean is None:
            return scores
        if rotary is None:
            return scores + queries.raw @ mean.swapaxes(-1, -2)
        return scores + queries.waves(mean, rotary).at(positions)


class Unrotated:
    """Keys are coded turned back, where their distribution does not depend on position."""

    def to_code(
        self, keys: mx.array, mean: mx.array | None, rotary: Rotary | None, positions: Positions
    ) -> mx.array:
        """Turn back, then subtract the mean."""
        plain = keys if rotary is None else rotary.unrotate(keys, positions)
        return plain if mean is None else plain - mean

    def from_code(
        self, keys: mx.array, mean: mx.array | None, rotary: Rotary | None, positions: Positions
    ) -> mx.array:
        """Add the mean, then rotate to each position."""
        plain = keys if mean is None else keys + mean
        return plain if rotary is None else rotary.rotate(plain, positions)


@frozen
class PreRope(Unrotated):
    """Far keys are decoded, rotated to their true positions, then scored."""

    def queries(
        self, raw: mx.array, transform: Transform, rotary: Rotary | None, positions: range
    ) -> Queries:
        """Nothing to prepare where keys rotate; else the transform's dual."""
        return Queries(raw, raw if rotary is not None else transform.query(raw), positions)

    def scores(
        self,
        queries: Queries,
        fields: Fields,
        mean: mx.array | None,
        positions: range,
        *,
        coder: Coder,
        transform: Transform,
        rotary: Rotary | None,
    ) -> mx.array:
        """Decode once a KV head, rotate, one product; from the codes where nothing rotates."""
        if rotary is None:
            scores = coder.scores(queries.mapped, fields)
            return scores if mean is None else scores + queries.raw @ mean.swapaxes(-1, -2)
        keys = self.from_code(transform.inverse(coder.decode(fields)), mean, rotary, positions)
        return dots(queries.raw, keys)
