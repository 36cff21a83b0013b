"""What one forward step of a batch attends to: each row's own tokens, in a padded rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
from attrs import frozen

from kvcompress.attention.masks import Mask, check_mask
from kvcompress.attention.queries import check_queries
from kvcompress.cache.step import Step
from kvcompress.errors import BatchError, ConfigError
from kvcompress.layers import LayerSpec


class GeometryMask(mx.array):
    """A causal mask over the padded rectangle, which says how it came about.

    Attention here works from the geometry and never computes the array.
    """

    window_size: int | None


@frozen
class RowPlace:
    """Where a row's new tokens stand in a padded chunk, and its tokens in the rectangle."""

    skip: int  # padding before them in the chunk
    take: int  # how many they are
    start: int  # column of the row's first token
    stop: int  # column after its last


class BatchStep:
    """What one forward step of a batch attends to, row by row.

    Args:
        steps: One step a row; ``None`` for a row that holds nothing yet.
        places: Where each row's tokens stand.
        length: Tokens of the padded chunk.
        layer: The layer.
    """

    def __init__(
        self,
        steps: Sequence[Step | None],
        places: Sequence[RowPlace],
        length: int,
        layer: LayerSpec,
    ) -> None:
        self._steps = steps
        self._places = places
        self._length = length
        self._layer = layer

    @property
    def _width(self) -> int:
        """Columns of the rectangle."""
        return max(place.stop for place in self._places)

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """``(B, Hq, L, D)`` to ``(B, Hq, L, Dv)``; zeros where a row has padding.

        Raises:
            ConfigError: Queries, mask or sinks do not fit the rectangle or each other.
        """
        check_queries(self._layer, len(self._steps), queries, sinks)
        if queries.shape[2] != self._length:
            raise ConfigError(
                f"attention: layer {self._layer.index}: a batch's queries must be those of its "
                f"chunk of {self._length} (got {queries.shape[2]})"
            )
        if not isinstance(mask, GeometryMask):
            check_mask(mask, queries.shape, self._width)
        rows = []
        for i, (step, place) in enumerate(zip(self._steps, self._places, strict=True)):
            shape = (1, queries.shape[1], self._length, self._layer.value_dim)
            if step is None or not place.take:
                rows.append(mx.zeros(shape, queries.dtype))
                continue
            out = step.attend(
                queries[i : i + 1, :, place.skip : place.skip + place.take],
                scale=scale,
                mask=self._row_mask(mask, i, step),
                sinks=sinks,
            )
            after = self._length - place.skip - place.take
            if place.skip or after:
                out = mx.pad(out, [(0, 0), (0, 0), (place.skip, after), (0, 0)])
            rows.append(out)
        return mx.concatenate(rows, axis=0)

    def _row_mask(self, mask: Mask, row: int, step: Step) -> Mask:
        place = self._places[row]
        if isinstance(mask, GeometryMask):
            if mask.window_size is not None:
                return _window_mask(step.tokens, place.take, mask.window_size)
            return "causal" if place.take > 1 else None
        if not isinstance(mask, mx.array):
            return mask
        own = mask if mask.ndim < 4 or mask.shape[0] == 1 else mask[row : row + 1]
        own = own[..., place.start : place.stop]
        if own.ndim > 1 and own.shape[-2] == self._length:
            own = own[..., place.skip : place.skip + place.take, :]
        return own

    @cached_property
    def dense(self) -> tuple[mx.array, mx.array]:
        """All rows as one padded rectangle, ``(B, Hkv, W, D)`` and ``(B, Hkv, W, Dv)``."""
        width = self._width
        pairs = [
            tuple(_padded(x, place, width) for x in step.dense)
            for step, place in zip(self._steps, self._places, strict=True)
            if step is not None
        ]
        if len(pairs) < len(self._steps):
            raise BatchError("a batch whose rows are partly empty has no dense view")
        return (
            mx.concatenate([keys for keys, _ in pairs], axis=0),
            mx.concatenate([values for _, values in pairs], axis=0),
        )


def _padded(x: mx.array, place: RowPlace, width: int) -> mx.array:
    return mx.pad(x, [(0, 0), (0, 0), (place.start, width - place.stop), (0, 0)])


def _window_mask(tokens: int, queries: int, window: int) -> mx.array:
    places = mx.arange(tokens - queries, tokens)[:, None]
    others = mx.arange(tokens)[None]
    return (places >= others) & (places < others + window)
