"""What the steps of attention cost here, number by number: where the time goes.

    python benchmarks/primitives.py --out docs/results/primitives.json

Each operation runs on the scores of 32 query heads over 4,096 tokens, or on the keys of 8 heads of
128 channels; nanoseconds a number that it gives, or that a product reads, medians of 40. ``launch``
is what MLX takes to run one more operation on a single number, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
from results import deliver  # noqa: E402

from kvcompress.models.room import keep_freed_memory  # noqa: E402

TOKENS, HEADS, KV_HEADS, DIM = 4096, 32, 8, 128


def seconds(run: Callable[[], mx.array], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def launch(rounds: int, count: int = 100) -> float:
    """Seconds for one more operation in a graph of some."""
    one = mx.zeros(1)

    def chain(length: int) -> mx.array:
        out = one
        for _ in range(length):
            out = out + 1
        return out

    return (
        seconds(lambda: chain(2 * count), rounds) - seconds(lambda: chain(count), rounds)
    ) / count


def operations() -> dict[str, tuple[Callable[[], mx.array], int]]:
    """Each with how many numbers it gives, or for products how many it reads."""
    scores = -mx.abs(mx.random.normal((1, KV_HEADS, HEADS // KV_HEADS, TOKENS)))
    queries = mx.random.normal((1, KV_HEADS, HEADS // KV_HEADS, DIM))
    keys = mx.random.normal((1, KV_HEADS, TOKENS, DIM))
    codes = mx.random.randint(0, 256, keys.shape).astype(mx.uint8)
    words, scales, biases = mx.quantize(keys.reshape(-1, DIM), group_size=64, bits=4)
    words, scales, biases = (x.reshape(KV_HEADS, TOKENS, -1) for x in (words, scales, biases))
    table = mx.random.normal((256,))
    rows = mx.random.normal((256, 8))
    few = codes[..., : DIM // 8].astype(mx.uint32)
    index = mx.contiguous(codes[..., : DIM // 2].swapaxes(-1, -2))
    along, pairs = (mx.random.normal((1, 1, 1, 256 * n)) for n in (1, 2))
    pairs = pairs.view(mx.complex64)
    two, twice = mx.conj(queries.view(mx.complex64)), keys.view(mx.complex64)
    mx.eval(scores, queries, keys, codes, words, scales, biases, table, rows, few)
    mx.eval(index, along, pairs, two, twice)
    return {
        "multiply": (lambda: scores * 1.5, scores.size),
        "exp": (lambda: mx.exp(scores), scores.size),
        "power of 2": (lambda: mx.power(2.0, scores), scores.size),
        "softmax": (lambda: mx.softmax(scores, axis=-1), scores.size),
        "bytes to float32": (lambda: codes.astype(mx.float32), codes.size),
        "look up a number": (lambda: table[codes.astype(mx.uint32)], codes.size),
        "look up 8 channels": (lambda: mx.take(rows, few, axis=0), few.size * 8),
        "look up a number along the tokens": (
            lambda: mx.take_along_axis(along, index, axis=-1),
            index.size,
        ),
        "look up two numbers along the tokens": (
            lambda: mx.take_along_axis(pairs, index, axis=-1),
            2 * index.size,
        ),
        "product with keys in complex pairs": (
            lambda: mx.real(two @ twice.swapaxes(-1, -2)),
            keys.size,
        ),
        "product with float32 keys": (lambda: queries @ keys.swapaxes(-1, -2), keys.size),
        "quantized_matmul, 4 bits": (
            lambda: mx.quantized_matmul(
                queries[0], words, scales, biases, transpose=True, group_size=64, bits=4
            ),
            keys.size,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    keep_freed_memory()
    rows = {
        name: 1e9 * seconds(run, args.rounds) / count for name, (run, count) in operations().items()
    }
    result = {
        "nanoseconds": rows,
        "launch_microseconds": 1e6 * launch(args.rounds),
        "mlx": mx.__version__,
    }
    deliver(result, args.out)


if __name__ == "__main__":
    main()
