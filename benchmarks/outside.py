"""What a cache does in a decode step beside attention, at several lengths, in turn.

    python benchmarks/outside.py --out docs/results/outside.json

A step appends a token, codes a block where one has grown old, and makes the views that attention is
handed. Each round times one step at every length, in an order of its own, so that the machine's
noise meets all of them alike; medians, and the median of the ratios to the shortest in the same
round. Tables of the calibrated methods are random here: what they cost does not depend on their
values.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from attention import SHAPES, compressed, filled  # noqa: E402
from results import deliver  # noqa: E402

METHODS = (
    "turboquant:bits=4",
    "turboquant:bits=2",
    "vecinfer:codebook=random",
    "a2ats:codebook=random",
    "commvq:bits=1:codebook=random",
)


def measure(spec: str, head_dim: int, lengths: list[int], rounds: int) -> dict[str, Any]:
    kv_heads = SHAPES[head_dim][1]
    caches = [filled(compressed(spec, head_dim), kv_heads, head_dim, n) for n in lengths]
    row = mx.random.normal((1, kv_heads, 1, head_dim))
    q = mx.random.normal((1, SHAPES[head_dim][0], 1, head_dim))
    mx.eval(row, q)

    def step(cache: Any) -> float:
        start = time.perf_counter()
        keys, _ = cache.update_and_fetch(row, row)
        mx.eval(list(cache.exact.arrays()))
        spent = 1e3 * (time.perf_counter() - start)
        keys.step.attend(q, scale=1.0)  # asked for as a model does, and not computed
        mx.eval(list(cache.exact.arrays()))  # but for what a cache wants to know of it
        return spent

    # What was done just before leaves its mark on the processor's caches.
    order = np.random.default_rng(0)
    times = np.empty((rounds, len(caches)))
    for turn in times:
        for place in order.permutation(len(caches)):
            turn[place] = step(caches[place])
    return {
        "method": spec,
        "head_dim": head_dim,
        "tokens": lengths,
        "milliseconds": np.median(times, axis=0).tolist(),
        "ratios": np.median(times / times[:, :1], axis=0).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--method", nargs="+", default=METHODS)
    args = parser.parse_args()
    rows = [
        measure(spec, head_dim, args.tokens, args.rounds)
        for head_dim in SHAPES
        for spec in args.method
    ]
    deliver({"rows": rows, "mlx": mx.__version__}, args.out)


if __name__ == "__main__":
    main()
