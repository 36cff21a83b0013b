"""One rank of a tensor-parallel model: a program that the tests run several times at once.

    python -m tests.distributed.rank FOLDER

reads ``FOLDER/cal.safetensors`` and leaves what it found in ``FOLDER/RANK.npz``. The tests' own
process does the same with the whole model, as a rank that is alone.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_map_with_path  # noqa: E402

import kvcompress as kv  # noqa: E402
from tests.calibrate.fakes import PROSE, ByteTokenizer  # noqa: E402
from tests.zoo import tiny  # noqa: E402

PROMPT = [int(c) for c in PROSE.encode()[:60]]
STEPS = 20
CALIBRATED: dict[str, tuple[str, dict[str, Any]]] = {
    "vecinfer": ("vecinfer", {}),
    "vecinfer by head": ("vecinfer", {"bits": 1.0, "codebooks": "sub-space"}),
    "a2ats": ("a2ats", {"retrieval_fraction": 1.0, "codebook_bits": 6}),
    "turboquant, calibrated": ("turboquant", {"centre": "calibrated"}),
}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "fp16": ("fp16", {}),
    "affine": ("affine", {}),
    "turboquant": ("turboquant", {}),
    "turboquant, prod": ("turboquant", {"variant": "prod", "bits": 3}),
}
COMMVQ = ("commvq", {"bits": 2})
EXACT = {"window": 8, "sinks": 4, "block": 16}


def model_of() -> nn.Module:
    """Two layers, eight query heads on four KV heads; attention decides what it writes."""
    model = tiny(
        "llama",
        vocab_size=256,
        head_dim=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model.update(
        tree_map_with_path(lambda n, x: 3 * x if "self_attn" in n else x, model.parameters())
    )
    return model


def calibrated(model: nn.Module, kinds: dict[str, tuple[str, dict[str, Any]]]) -> kv.Calibration:
    """A calibration on very little text."""
    methods = [kv.get_method(name, **options) for name, options in kinds.values()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* tokens are few", UserWarning)
        return kv.calibrate(model, ByteTokenizer(), PROSE, methods, tokens=1024)


def run(model: nn.Module, name: str, **options: Any) -> dict[str, np.ndarray]:
    """Greedy tokens after the prompt, and the second layer's keys and values as they decode."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    method = kv.get_method(name, **({} if name == "fp16" else EXACT), **options)
    with kv.attach(model, method):
        caches = make_prompt_cache(model)
        steps = generate_step(mx.array(PROMPT), model, max_tokens=STEPS, prompt_cache=caches)
        tokens = [int(token) for token, _ in steps]
    if name == "fp16":
        return {"tokens": np.array(tokens)}
    keys, values = caches[1].now().dense
    coded = np.array(caches[1].tokens_coded)
    mx.eval(keys, values)
    return {
        "tokens": np.array(tokens),
        "keys": np.array(keys[0]),
        "values": np.array(values[0]),
        "coded": coded,
    }


def findings(model: nn.Module, calibration: kv.Calibration) -> dict[str, np.ndarray]:
    """What every method makes of the model, by ``METHOD/WHAT``."""
    found = {}
    for kind, (name, options) in {**PLAIN, **CALIBRATED}.items():
        given = {"calibration": calibration} if kind in CALIBRATED else {}
        for what, value in run(model, name, **options, **given).items():
            found[f"{kind}/{what}"] = value
    name, options = COMMVQ
    own = calibrated(model, {"": COMMVQ})
    for what, value in run(model, name, **options, calibration=own).items():
        found[f"{name}/{what}"] = value
    return found


def main(folder: Path) -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    model = model_of()
    model.shard(group)
    calibration = kv.Calibration.load(folder / "cal.safetensors")
    part = calibration.shard(group.rank(), group.size())
    found = findings(model, part)
    refused = ""
    try:
        run(model, "vecinfer", calibration=calibration)
    except kv.CalibrationMismatch as error:
        refused = str(error)
    np.savez(folder / f"{group.rank()}.npz", refused=np.array(refused), **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
