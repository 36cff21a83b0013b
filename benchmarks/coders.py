"""Time the coders: encoding, scores and weighted sums of packed tokens, against float32.

Run it as ``python benchmarks/coders.py [--tokens 4096] [--out coders.json]``. Times are the
least of several; read them as ratios to ``float32``, since machines differ.
"""

from __future__ import annotations

from kvcompress.openblas import prefer_openblas

HAS_OPENBLAS = prefer_openblas()  # before anything imports mlx

import argparse  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import mlx.core as mx  # noqa: E402

from kvcompress.stages.affine_coder import AffineCoder  # noqa: E402
from kvcompress.stages.base import Coder  # noqa: E402
from kvcompress.stages.gain_coder import GainCoder  # noqa: E402
from kvcompress.stages.levels import LloydMaxLevels, UniformLevels  # noqa: E402
from kvcompress.stages.sketch_coder import SketchCoder  # noqa: E402
from kvcompress.stages.transform import RandomisedHadamard  # noqa: E402
from kvcompress.stages.tree_coder import TreeCoder  # noqa: E402

SHAPES = ((3, 64), (8, 128))  # KV heads and channels: a small model, and an ordinary one
QUERIES = (3, 96)  # rows a KV head: a decoded token of three query heads, and a chunk of 32


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Least time of evaluating what ``work`` returns: what other processes disturb least."""
    mx.eval(work())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - start)
    return round(min(times) * 1e3, 4)


def coders(heads: int, dim: int) -> Iterator[tuple[str, Coder]]:
    for bits in (1, 2, 3, 4, 6, 8):
        yield f"uniform {bits}", GainCoder(UniformLevels(dim, bits), heads)
    for bits in (1, 2, 3, 4, 8):
        yield f"lloyd-max {bits}", GainCoder(LloydMaxLevels(dim, bits), heads)
    for bits in (2, 3, 4):
        yield f"tree {bits}", TreeCoder(dim, heads, bits)
        yield f"sketch {bits}", SketchCoder(dim, heads, bits)
    for bits in (2, 4, 8):
        yield f"affine {bits}", AffineCoder(dim, heads, bits, 64, "float32")


def measure(heads: int, dim: int, tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    z = mx.random.normal((1, heads, tokens, dim), key=mx.random.key(0))
    q = {m: mx.random.normal((1, heads, m, dim), key=mx.random.key(m)) for m in QUERIES}
    p = {m: mx.softmax(mx.random.normal((1, heads, m, tokens)), axis=-1) for m in QUERIES}
    mx.eval(z, q, p)
    shape = {"heads": heads, "dim": dim, "tokens": tokens}

    rotation = RandomisedHadamard(dim)
    yield shape | {
        "coder": "rotation",
        "encode_us_per_token": milliseconds(lambda: rotation.forward(z), repeats) * 1e3 / tokens,
    }
    yield (
        shape
        | {"coder": "float32"}
        | {
            f"{name}_ms_{m}": milliseconds(work, repeats)
            for m in QUERIES
            for name, work in (
                ("scores", lambda m=m: q[m] @ z.swapaxes(-1, -2)),
                ("mix", lambda m=m: p[m] @ z),
            )
        }
    )
    for name, coder in coders(heads, dim):
        fields = coder.encode(z)
        mx.eval(fields)
        row: dict[str, Any] = shape | {"coder": name}
        row["bytes_per_token"] = sum(f.bytes_per_token for f in coder.fields)
        row["table_bytes"] = coder.table_bytes
        row["relative_error"] = round(
            (mx.square(coder.decode(fields) - z).sum() / mx.square(z).sum()).item(), 6
        )
        encode = milliseconds(lambda c=coder: c.encode(z), repeats)
        row["encode_us_per_token"] = encode * 1e3 / tokens
        row["decode_ms"] = milliseconds(lambda c=coder, f=fields: c.decode(f), repeats)
        for m in QUERIES:
            row[f"scores_ms_{m}"] = milliseconds(
                lambda c=coder, f=fields, m=m: c.scores(q[m], f), repeats
            )
            row[f"mix_ms_{m}"] = milliseconds(
                lambda c=coder, f=fields, m=m: c.mix(p[m], f), repeats
            )
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to the terminal")
    options = parser.parse_args()
    rows = [
        row for heads, dim in SHAPES for row in measure(heads, dim, options.tokens, options.repeats)
    ]
    result = {
        "schema_version": 1,
        "device": str(mx.default_device()),
        "openblas": HAS_OPENBLAS,
        "mlx": mx.__version__,
        "machine": platform.machine(),
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
