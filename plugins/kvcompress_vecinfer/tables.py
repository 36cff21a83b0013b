"""What a calibration gives vecinfer: scales of the channels, and codebooks."""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.calibrate import LayerSamples
from kvcompress.stages.hashing import hashed

POSITIONS: Final = 8192  # that keys are spread over: windows are too short to show slow pairs turn

_DEAD = 1e-4  # of the median: the least scale of a channel


@frozen
class Code:
    """Sub-vectors of ``sub_dim`` channels to ``bits`` bits."""

    sub_dim: int
    bits: int

    @property
    def rounds(self) -> int:
        """Rounds of k-means: entries of 12 bits are so many that more move them little."""
        return 10 if self.bits <= 8 else 3


def centred(samples: LayerSamples) -> LayerSamples:
    """Keys and values without their means."""
    moments = samples.moments
    return attrs.evolve(
        samples,
        keys=samples.keys - moments.key_mean,
        values=samples.values - moments.value_mean,
    )


def spread(samples: LayerSamples, seed: int) -> LayerSamples:
    """The keys at other positions: evenly over a long context, in random order."""
    count = len(samples.keys)
    order = np.argsort(hashed(count, "vecinfer", "positions", seed), kind="stable")
    return attrs.evolve(samples, positions=order * POSITIONS // count)


def channel_scale(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """``sqrt(max |k|)`` of every channel; a positive number also for dead ones.

    Args:
        keys: ``(N, H, D)``.

    Returns:
        ``(H, D)``.
    """
    scale: NDArray[np.float32] = np.sqrt(np.abs(keys).max(axis=0))
    for head in scale:
        live = head[head > 0]
        np.maximum(head, _DEAD * np.median(live) if len(live) else 1.0, out=head)
    return scale
