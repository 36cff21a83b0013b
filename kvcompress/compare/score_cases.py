"""Made-up tokens that show what a rope policy does to near and to far keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import mlx.core as mx
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvcompress.calibrate.samples import LayerSamples
from kvcompress.compare.fitted import samples_of
from kvcompress.layers import LayerSpec, Rotary

LAYER: Final = LayerSpec(head_dim=32, dtype="float32", rotary=Rotary(32, base=10_000.0))
TOKENS: Final = (200, 400)
SEEDS: Final = range(5)
RECENT: Final = 16
"""The last tokens of a sequence, which caches keep exact here."""

PLACES: Final = {
    "local_recency": "the last tokens",
    "long_range_dependent": "the first tokens",
}
"""Where each made-up workload has the keys that its query asks for."""


@frozen(eq=False)
class Case:
    """Tokens of one layer and the queries at their end.

    Attributes:
        name: What sets the case apart from the others of its workload.
        layer: The layer.
        keys: ``(1, Hkv, n, D)`` in the layer's dtype, rotated to positions 0 to ``n - 1``.
        values: ``(1, Hkv, n, Dv)``.
        queries: ``(1, Hq, L, D)``, rotated to the last ``L`` positions.
        samples: What tables are fitted to.
        seed: For whatever a fit draws.
        earlier: ``(1, Hq, n - L, D)``, the queries of the tokens before, for methods that code by
            what was asked for; ``None`` where there are none.
    """

    name: str
    layer: LayerSpec
    keys: mx.array
    values: mx.array
    queries: mx.array
    samples: LayerSamples
    seed: int
    earlier: mx.array | None = None


def made_up_cases(workload: str, tokens: int) -> Iterator[Case]:
    """The cases of ``local_recency`` or ``long_range_dependent``, one a seed.

    Keys are ``0.3 N(0, I)`` before RoPE, but for a tenth of them, which are ``x + 0.05 N(0, I)``
    with ``x ~ N(0, I)``: among the last tokens or the first. The query is ``x + 0.02 N(0, I)`` at
    the last position. Tables are fitted to these same keys.
    """
    for seed in SEEDS:
        drawn = np.random.default_rng([seed, tokens])
        x, keys, values, noise = (
            drawn.standard_normal((rows, LAYER.head_dim)) for rows in (1, tokens, tokens, 1)
        )
        first = tokens - RECENT if workload == "local_recency" else 0
        alike = slice(first, first + tokens // 10)
        near = x + 0.05 * keys
        keys *= 0.3
        keys[alike] = near[alike]
        rotated_keys = _rotated(keys, range(tokens))
        rotated_query = _rotated(x + 0.02 * noise, range(tokens - 1, tokens))
        plain_values = mx.array(values[None, None].astype(np.float32))
        yield Case(
            name=f"seed {seed}",
            layer=LAYER,
            keys=rotated_keys,
            values=plain_values,
            queries=rotated_query,
            samples=samples_of(LAYER, rotated_keys, plain_values, rotated_query, tokens - 1),
            seed=seed,
        )


def _rotated(rows: NDArray[np.float64], positions: range) -> mx.array:
    x = mx.array(rows[None, None].astype(np.float32))
    return x if LAYER.rotary is None else LAYER.rotary.rotate(x, positions)
