"""Time of one decode step's attention on codes against the plain float32 cache, side by side.

    python benchmarks/attention.py --out docs/results/attention.json

The two are timed in turn, so that the machine's noise meets both: medians, and the median and the
quartiles of the ratios of single rounds. Tables of the calibrated methods are random here: what
they cost does not depend on their values. The plain cache in float16 is a row too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402
from results import deliver  # noqa: E402

from kvcompress.cache import CompressedKVCache  # noqa: E402
from kvcompress.compare.methods import method_of  # noqa: E402
from kvcompress.layers import LayerSpec, Rotary  # noqa: E402
from kvcompress.models.room import CPU_CACHE_BYTES  # noqa: E402

SHAPES = {64: (9, 3), 128: (32, 8)}  # head size: query and KV heads
HALF = "plain float16"
METHODS = (
    HALF,
    "turboquant:bits=4",
    "turboquant:bits=2",
    "vecinfer:bits=2:codebook=random",
    "vecinfer:bits=1:codebook=random",
    "a2ats:sub_dim=4:codebook=random",
    "a2ats:codebook=random",
    "a2ats:codebook=random:attend_fraction=0.1",
    "commvq:bits=1:codebook=random",
)
FEW = 5  # rounds of what is slow


def timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    mx.eval(step())
    return 1e3 * (time.perf_counter() - start)


def filled(cache: Any, kv_heads: int, head_dim: int, tokens: int) -> Any:
    """A cache that has seen random keys and values."""
    mx.random.seed(0)
    for start in range(0, tokens, 2048):
        shape = (1, kv_heads, min(2048, tokens - start), head_dim)
        cache.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
        mx.eval(cache.state)
    return cache


def compressed(spec: str, head_dim: int) -> CompressedKVCache:
    heads, kv_heads = SHAPES[head_dim]
    layer = LayerSpec(
        kv_heads=kv_heads,
        query_heads=heads,
        head_dim=head_dim,
        dtype="float32",
        rotary=Rotary(head_dim, base=1e5),
    )
    method = method_of(spec)
    return CompressedKVCache(method, layer, method.bind(layer))


def measure(spec: str, head_dim: int, tokens: int, rounds: int) -> dict[str, Any]:
    heads, kv_heads = SHAPES[head_dim]
    plain = filled(KVCache(), kv_heads, head_dim, tokens)
    exact = [x[..., :tokens, :] for x in (plain.keys, plain.values)]
    q = mx.random.normal((1, heads, 1, head_dim))
    half = [x.astype(mx.float16) for x in (q, *exact)]
    mx.eval(q, half)
    scale = head_dim**-0.5

    def dense(q: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale)

    if spec == HALF:
        step = partial(dense, *half)
    else:
        ours = filled(compressed(spec, head_dim), kv_heads, head_dim, tokens)
        step = lambda: ours.now().attend(q, scale=scale)  # noqa: E731
    count = FEW if spec == HALF or spec.startswith("commvq") else rounds
    pairs = np.array([(timed(partial(dense, q, *exact)), timed(step)) for _ in range(count)])
    ratios = pairs[:, 1] / pairs[:, 0]
    plain_ms, codes_ms = np.median(pairs, axis=0).tolist()
    return {
        "method": spec,
        "head_dim": head_dim,
        "query_heads": heads,
        "kv_heads": kv_heads,
        "tokens": tokens,
        "plain_ms": plain_ms,
        "codes_ms": codes_ms,
        "ratio": float(np.median(ratios)),
        "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--method", nargs="+", default=METHODS)
    kept = "bytes of freed memory that MLX keeps"
    parser.add_argument("--kept", type=int, default=CPU_CACHE_BYTES, help=kept)
    args = parser.parse_args()
    mx.set_cache_limit(args.kept)
    rows = [
        measure(spec, head_dim, tokens, args.rounds)
        for head_dim in args.head_dim
        for tokens in args.tokens
        for spec in args.method
    ]
    deliver({"rows": rows, "mlx": mx.__version__}, args.out)


if __name__ == "__main__":
    main()
