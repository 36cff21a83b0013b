"""Stored, resident and peak bytes of caches, side by side in one run.

    python benchmarks/memory.py --out docs/results/memory.json

Two parts: what a cache of 4,096 tokens takes on the demo model's sizes, counted three ways; and
the peak of a long prefill in chunks of 512 on a tiny model, which must stay below the plain
cache's and grow more slowly.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from results import deliver  # noqa: E402

import kvcompress as kv  # noqa: E402
from kvcompress.cache.walk import reachable_arrays  # noqa: E402


def tiny_llama(heads: int, kv_heads: int, head_dim: int, layers: int) -> nn.Module:
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(0)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=layers,
            intermediate_size=64,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=32,
            rope_theta=100000.0,
        )
    )
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


def caches_of(spec: str, model: nn.Module) -> list[Any]:
    from kvcompress.compare.methods import method_of

    return method_of(spec).make_cache(model)


def prefill(model: nn.Module, caches: list[Any], tokens: int, chunk: int = 512) -> None:
    for start in range(0, tokens, chunk):
        ids = mx.arange(start, min(start + chunk, tokens))[None] % 32
        model(ids, cache=caches)
        mx.eval([c.state for c in caches])
        mx.clear_cache()


def stored(spec: str, tokens: int) -> dict[str, Any]:
    """Bytes of a cache, as predicted, as counted, as walked, and as MLX's allocator sees them."""
    model = tiny_llama(9, 3, 64, layers=3)
    gc.collect()
    before = mx.get_active_memory()
    caches = caches_of(spec, model)
    mx.eval(list(reachable_arrays(caches)))
    tables = mx.get_active_memory() - before
    prefill(model, caches, tokens)
    gc.collect()
    active = mx.get_active_memory() - before
    report = kv.report(caches)
    own = [c.__dict__ | {"codec": None, "lease": None, "method": None} for c in caches]
    return {
        "method": spec,
        "tokens": tokens,
        "predicted_bytes": report.predicted_bytes,
        "stored_bytes": report.stored_bytes,
        "resident_bytes": report.resident_bytes,
        "walked_bytes": sum(int(a.nbytes) for a in reachable_arrays(own)),
        "active_bytes": active,
        "table_bytes": tables,
        "times_smaller": report.times_smaller,
        "bits_per_value": report.bits_per_value,
    }


def peak(spec: str, tokens: int) -> dict[str, Any]:
    """Peak bytes above the weights of one prefill in chunks of 512."""
    model = tiny_llama(2, 1, 64, layers=2)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches = caches_of(spec, model)
    prefill(model, caches, tokens)
    return {"method": spec, "tokens": tokens, "peak_bytes": mx.get_peak_memory() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    args = parser.parse_args()
    ours = [f"turboquant:bits={bits}:window=64" for bits in (4, 3, 2)]
    result = {
        "stored": [stored(spec, 4096) for spec in ours],
        "peak": [peak(spec, t) for spec in ("fp16", *ours[::2]) for t in args.tokens],
        "mlx": mx.__version__,
    }
    deliver(result, args.out)


if __name__ == "__main__":
    main()
