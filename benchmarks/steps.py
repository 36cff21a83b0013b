"""Whole steps of the embedded model: a token in a long context, and a prompt of 4,096.

    python benchmarks/steps.py --out docs/results/steps.json

Plain caches and each method's take turns, token by token, chunk by chunk, and a few tokens of
mlx-lm's generator at a time, so that the machine's noise meets both: medians of the times, and of
the ratios of turns to the plain ones. A token alone is computed before the next one is begun; the
generator, which is what a user waits for, builds the next token's graph meanwhile. The context of
the tokens is filled with random keys and values, and the tables of calibrated methods are random
too: what a step takes does not depend on them.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from attention import filled, timed  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from results import deliver  # noqa: E402

from kvcompress.compare.methods import method_of  # noqa: E402
from kvcompress.models import load_model  # noqa: E402
from kvcompress.models.room import keep_freed_memory  # noqa: E402

METHODS = (
    "turboquant",
    "turboquant:bits=2",
    "vecinfer:codebook=random",
    "a2ats:codebook=random",
    "commvq:bits=1:codebook=random",
)
CHUNK = 512
TURN = 8  # tokens that the generator gives in a turn


def computed(model: Any, tokens: mx.array, caches: list[Any]) -> Any:
    """What mlx-lm has computed of a token, and of a prompt's chunk, whose logits nobody wants."""
    logits = model(tokens, cache=caches)
    return logits if tokens.shape[1] == 1 else [cache.state for cache in caches]


def turns(model: Any, pieces: list[mx.array], plain: list[Any], ours: list[Any]) -> np.ndarray:
    """Milliseconds of each piece with plain caches and with ours, ``(pieces, 2)``."""
    return np.array(
        [[timed(partial(computed, model, x, each)) for each in (plain, ours)] for x in pieces]
    )


def generated(model: Any, caches: list[Any]) -> float:
    """Milliseconds a token, of those that mlx-lm's generator gives once it is under way."""
    prompt = mx.array([5])
    tokens = generate_step(prompt, model, max_tokens=TURN + 2, prompt_cache=caches)
    next(tokens), next(tokens)
    start = time.perf_counter()
    count = sum(1 for _ in tokens)
    taken = 1e3 * (time.perf_counter() - start) / count
    mx.synchronize()  # it has begun one more
    return taken


def measure(model: Any, spec: str, args: argparse.Namespace) -> dict[str, Any]:
    method = method_of(spec)
    caches = make_prompt_cache(model), method.make_cache(model)
    for plain, ours in zip(*caches, strict=True):
        for cache in (plain, ours):
            filled(cache, ours.layer.kv_heads, ours.layer.head_dim, args.context)
    tokens = mx.random.randint(0, 1000, (1, args.prompt))
    singles = [tokens[:, i : i + 1] for i in range(args.rounds + 1)]
    decode = turns(model, singles, *caches)[1:]
    given = np.array(
        [[generated(model, each) for each in caches] for _ in range(1 + args.rounds // 2)]
    )[1:]

    caches = make_prompt_cache(model), method.make_cache(model)
    chunks = [tokens[:, i : i + CHUNK] for i in range(0, args.prompt, CHUNK)]
    prefill = turns(model, chunks, *caches)
    whole = prefill.sum(axis=0)
    return {
        "method": spec,
        "decode_ms": np.median(decode, axis=0).tolist(),
        "decode_speed": float(np.median(decode[:, 0] / decode[:, 1])),
        "generated_ms": np.median(given, axis=0).tolist(),
        "generated_speed": float(np.median(given[:, 0] / given[:, 1])),
        "prefill_tokens_per_second": (1e3 * args.prompt / whole).tolist(),
        "prefill_speed": float(whole[0] / whole[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--context", type=int, default=8192 - 64)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--method", nargs="+", default=METHODS)
    args = parser.parse_args()
    keep_freed_memory()
    model = load_model().model
    rows = []
    for spec in args.method:
        rows.append(measure(model, spec, args))
        print(rows[-1], file=sys.stderr)
    asked = {name: getattr(args, name) for name in ("context", "prompt", "rounds")}
    deliver({**asked, "chunk": CHUNK, "rows": rows, "mlx": mx.__version__}, args.out)


if __name__ == "__main__":
    main()
