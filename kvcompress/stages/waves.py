"""Scores of the mean that rotated keys bear, without making keys."""

from __future__ import annotations

import mlx.core as mx
from attrs import frozen

from kvcompress.layers import Rotary
from kvcompress.stages.pairs import complex_pairs
from kvcompress.stages.phases import PIECE, phases, turn


@frozen(eq=False)
class Waves:
    """What queries make of a rotated mean: a wave over positions for each pair of channels.

    A pair of ``q`` and of the mean contributes ``a cos(t) + b sin(t)`` at the phase ``t``. Counted
    from a run's first position, phases are the same for every run, head, layer and sequence, so
    the scores of all its tokens are one product with a shared table.

    Attributes:
        rotary: The keys' rotation.
        pairs: ``(B, H, M, P)`` complex64, the waves at position 0.
        still: ``(B, H, M, 1)`` float32, from the channels that do not rotate; ``None`` where all
            do.
    """

    rotary: Rotary
    pairs: mx.array
    still: mx.array | None

    @classmethod
    def of(cls, q: mx.array, mean: mx.array, rotary: Rotary) -> Waves:
        """Those of post-RoPE queries ``(B, H, M, D)`` and an unrotated mean ``(B, H, 1, D)``."""
        q_pairs, q_rest = complex_pairs(q, rotary)
        pairs, rest = complex_pairs(mean, rotary)
        still = q_rest @ rest.swapaxes(-1, -2) if rotary.dims < q.shape[-1] else None
        return cls(rotary, mx.conj(q_pairs) * pairs, still)

    def at(self, positions: range) -> mx.array:
        """``q . R_j mean`` for ``T`` positions in a row: ``(B, H, M, T)`` float32."""
        parts = []
        for start in range(positions.start, positions.stop, PIECE):
            begun = (self.pairs * mx.array(turn(self.rotary, start))).view(mx.float32)
            parts.append(begun @ phases(self.rotary)[: positions.stop - start].T)
        scores = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        return scores if self.still is None else scores + self.still
