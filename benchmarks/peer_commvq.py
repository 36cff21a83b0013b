"""A cache around a quantiser that encodes and decodes but keeps nothing: for ``peers.py``."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache


class EncodeDecodeCache:
    """Keeps one layer's indices, and decodes all of them at each step.

    Args:
        layer: The layer, whose rotation is taken off the keys before they are encoded.
        keys: A fitted quantiser of un-rotated keys, whose ``decode`` rotates them.
        values: A fitted quantiser of values.
    """

    def __init__(self, layer: Any, keys: Any, values: Any) -> None:
        self.layer = layer
        self.coders = (keys, values)
        self.codes: list[mx.array] = []  # (H * T, codebooks) uint8 each, tokens slowest
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Encode a chunk ``(1, H, L, D)``; decode every token, in the chunk's dtype."""
        _, H, L, D = keys.shape
        places = range(self.offset, self.offset + L)
        plain = self.layer.rotary.unrotate(keys, places)
        new = [
            coder.encode(x[0].swapaxes(0, 1).reshape(L * H, D), mx.zeros(L * H)).indices
            for coder, x in zip(self.coders, (plain, values), strict=True)
        ]
        old = self.codes
        self.codes = [mx.concatenate(pair) for pair in zip(old, new, strict=True)] if old else new
        self.offset += L
        keys, values = (
            self._decoded(part, H, D).astype(x.dtype) for part, x in enumerate((keys, values))
        )
        return keys, values

    def _decoded(self, part: int, H: int, D: int) -> mx.array:
        from veloxquant_mlx import EncodedVector

        indices = self.codes[part]
        places = mx.arange(self.offset) * (part == 0)
        encoded = EncodedVector(
            quantizer_type="comm_vq",
            batch_size=indices.shape[0],
            dim=D,
            indices=indices,
            norm=mx.repeat(places.astype(mx.float32), H),
        )
        rows: mx.array = self.coders[part].decode(encoded)
        return rows.reshape(1, self.offset, H, D).swapaxes(1, 2)

    @property
    def state(self) -> list[mx.array]:
        """What is kept."""
        return self.codes

    @property
    def nbytes(self) -> int:
        """Bytes of the indices."""
        return sum(int(codes.nbytes) for codes in self.codes)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask of mlx-lm's plain cache at the same offset."""
        shadow = KVCache()
        shadow.offset = self.offset
        return shadow.make_mask(*args, **kwargs)
