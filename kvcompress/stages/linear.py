"""Any invertible map of the channels, one for each head and block of channels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.stages.shared import shared_table

_ROWS = 32  # tokens of one matrix product


@frozen(eq=False)
class Linear:
    """``z = x A`` in blocks of ``s`` neighbouring channels; queries take ``A^-T``.

    Attributes:
        factor: ``(H, D / s, s, s)`` float32, ``A``.
        back: ``(H, D / s, s, s)`` float32, ``A^-1``.
    """

    factor: mx.array
    back: mx.array

    @classmethod
    def of(cls, blocks: NDArray[np.floating[Any]]) -> Linear:
        """From ``A`` as ``(H, D / s, s, s)``.

        Raises:
            ConfigError: The shape does not fit, or a block has no inverse in float32.
        """
        if blocks.ndim != 4 or blocks.shape[2] != blocks.shape[3] or not blocks.size:
            raise ConfigError(
                f"Linear: blocks must be (heads, blocks, channels, channels) (got {blocks.shape})"
            )
        wide = blocks.astype(np.float64)
        if not np.isfinite(wide).all() or (np.linalg.cond(wide) > 1e6).any():
            raise ConfigError("Linear: blocks must be finite and far from singular")
        return cls(shared_table(wide), shared_table(np.linalg.inv(wide)))

    @property
    def dim(self) -> int:
        """Channels, ``D``."""
        return int(self.factor.shape[1] * self.factor.shape[2])

    @property
    def table_bytes(self) -> int:
        """Bytes of the map and its inverse."""
        return int(self.factor.nbytes + self.back.nbytes)

    def forward(self, x: mx.array) -> mx.array:
        """``x A`` for ``(B, H, T, D)`` float32."""
        return self._apply(x, self.factor)

    def inverse(self, z: mx.array) -> mx.array:
        """``z A^-1``."""
        return self._apply(z, self.back)

    def query(self, q: mx.array) -> mx.array:
        """``q A^-T``."""
        return self._apply(q, self.back.swapaxes(-1, -2))

    def _apply(self, x: mx.array, blocks: mx.array) -> mx.array:
        # Products of one shape, however many tokens come together: the round-off of a product
        # depends on its shape, and so would the codes of what comes out.
        B, H, T, D = x.shape
        padded = mx.pad(x, [(0, 0), (0, 0), (0, -T % _ROWS), (0, 0)])
        cut = padded.reshape(B, H, -1, _ROWS, D // blocks.shape[-1], blocks.shape[-1])
        out = (cut.swapaxes(3, 4) @ blocks[:, None]).swapaxes(3, 4)
        return out.reshape(B, H, -1, D)[:, :, :T]
