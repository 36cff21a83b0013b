"""Time of one decode step's attention on codes against the plain float32 cache, side by side.

    python benchmarks/attention.py --out docs/results/attention.json

The two are timed in turn, so that the machine's noise meets both; medians, and ratios of them.
``outside`` is what the cache does in a step beside attention: append, code, make views.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
from results import deliver  # noqa: E402

from kvcompress.cache import CompressedKVCache  # noqa: E402
from kvcompress.compare.methods import method_of  # noqa: E402
from kvcompress.layers import LayerSpec, Rotary  # noqa: E402

SHAPES = {64: (9, 3), 128: (32, 8)}  # head size: query and KV heads


def timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    mx.eval(step())
    return 1e3 * (time.perf_counter() - start)


def measure(spec: str, head_dim: int, tokens: int, rounds: int) -> dict[str, Any]:
    from mlx_lm.models.cache import KVCache

    heads, kv_heads = SHAPES[head_dim]
    layer = LayerSpec(
        kv_heads=kv_heads,
        query_heads=heads,
        head_dim=head_dim,
        dtype="float32",
        rotary=Rotary(head_dim, base=1e5),
    )
    method = method_of(spec)
    ours = CompressedKVCache(method, layer, method.bind(layer))
    plain = KVCache()
    for start in range(0, tokens, 2048):
        shape = (1, kv_heads, min(2048, tokens - start), head_dim)
        k, v = mx.random.normal(shape), mx.random.normal(shape)
        for cache in (ours, plain):
            cache.update_and_fetch(k, v)
            mx.eval(cache.state)
    q = mx.random.normal((1, heads, 1, head_dim))
    row = mx.random.normal((1, kv_heads, 1, head_dim))
    mx.eval(q, row)
    scale = head_dim**-0.5

    def on_codes() -> mx.array:
        return ours.now().attend(q, scale=scale)

    def dense() -> mx.array:
        keys, values = (x[..., : plain.offset, :] for x in (plain.keys, plain.values))
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale)

    def outside() -> list[mx.array]:
        ours.update_and_fetch(row, row)
        return list(ours.exact.arrays())

    times: dict[str, list[float]] = {"codes": [], "plain": [], "outside": []}
    for _ in range(rounds):
        times["plain"].append(timed(dense))
        times["codes"].append(timed(on_codes))
        times["outside"].append(timed(outside))
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "method": spec,
        "head_dim": head_dim,
        "query_heads": heads,
        "kv_heads": kv_heads,
        "tokens": tokens,
        "plain_ms": median["plain"],
        "codes_ms": median["codes"],
        "ratio": median["codes"] / median["plain"],
        "outside_ms": median["outside"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--method", nargs="+", default=["turboquant:bits=4", "turboquant:bits=2"])
    args = parser.parse_args()
    mx.set_cache_limit(1 << 30)
    rows = [
        measure(spec, head_dim, tokens, args.rounds)
        for head_dim in SHAPES
        for tokens in args.tokens
        for spec in args.method
    ]
    deliver({"rows": rows, "mlx": mx.__version__}, args.out)


if __name__ == "__main__":
    main()
