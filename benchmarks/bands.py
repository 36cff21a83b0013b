"""What windowed RoPE costs by itself: keys and values kept exact, far scores by a few rotations.

    python benchmarks/bands.py --out docs/results/bands.json

The embedded model, 1,024 tokens read and 1,536 scored (``--protocol standard`` of ``kvcompress
compare``, without its retrieval test), a window of 64 tokens and 4 sinks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
from attrs import evolve, frozen  # noqa: E402

from kvcompress.codec import KVCodec, Pipeline  # noqa: E402
from kvcompress.compare.evaluate import Evaluator  # noqa: E402
from kvcompress.compare.metrics import METRICS  # noqa: E402
from kvcompress.compare.protocol import STANDARD  # noqa: E402
from kvcompress.compare.reference import Playback, Recording  # noqa: E402
from kvcompress.config import integer, number  # noqa: E402
from kvcompress.layers import LayerSpec  # noqa: E402
from kvcompress.method import Method  # noqa: E402
from kvcompress.models import load_model  # noqa: E402
from kvcompress.models.room import keep_freed_memory  # noqa: E402
from kvcompress.registry import get_method  # noqa: E402
from kvcompress.schema import Field  # noqa: E402
from kvcompress.stages.base import DecodingCoder, Fields  # noqa: E402
from kvcompress.stages.transform import Identity  # noqa: E402
from kvcompress.stages.windowed import WindowedRope  # noqa: E402
from kvcompress.text import encode, load_text  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "bands that grow by 1.2": {"growth": 1.2},
    "bands that grow by 1.5": {"growth": 1.5},
    "bands that grow by 2": {"growth": 2.0},
    "one rotation, b = 2048": {"b": 2048},
}


@frozen
class Exact(DecodingCoder):
    """Rows as they are, in float32."""

    dim: int
    heads: int
    table_bytes: int = 0

    @property
    def fields(self) -> tuple[Field, ...]:
        """The rows."""
        return (Field("rows", "float32", self.dim, self.heads),)

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        """Nothing to do."""
        return {"rows": z}

    def decode(self, fields: Fields) -> mx.array:
        """Nothing to undo."""
        return fields["rows"]


@frozen(kw_only=True)
class ExactBands(Method):
    """Nothing is coded; far keys stay un-rotated, and the query bears the rotation."""

    name: ClassVar[str] = "exact-bands"
    growth: float = number(2.0, low=1.05, high=64.0, help="Ratio of a band's ends.")
    b: int | None = integer(None, low=0, optional=True, help="One distance in place of bands.")

    def bind(self, layer: LayerSpec) -> KVCodec:
        """Exact rows under bands, or under one rotation."""
        keys, values = (
            Pipeline(Identity(dim), Exact(dim, layer.kv_heads))
            for dim in (layer.head_dim, layer.value_dim)
        )
        rope = WindowedRope(first=max(self.window, 1), growth=self.growth, constant=self.b)
        return KVCodec(layer=layer, keys=keys, values=values, rope=rope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    loaded = load_model(dtype="float32")
    protocol = evolve(STANDARD, decode=0, retrieval=0)
    ids = encode(loaded.tokenizer, load_text("prose-eval").content)
    windows = protocol.take_windows(ids, loaded.tokenizer.encode(""))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "full"
        for name, options in {"full": None, **CASES}.items():
            method = get_method("fp16") if options is None else ExactBands(window=64, **options)
            evaluator = Evaluator(
                model=loaded.model,
                tokenizer=loaded.tokenizer,
                protocol=protocol,
                metrics=METRICS,
                reference=(Recording if options is None else Playback)(reference),
            )
            make = method.make_cache
            found = evaluator.run(lambda make=make: make(loaded.model), windows).measures
            if options is not None:
                rows.append({"rope": name, "kl": found["kl"], "kl_error": found["kl_se"]})
                print(rows[-1], flush=True)
    text = json.dumps({"rows": rows, "mlx": mx.__version__}, indent=2) + "\n"
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
