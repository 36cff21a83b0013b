"""What becomes of every family that mlx-lm ships: which layers of it a method compresses.

    python -m benchmarks.families --out docs/results/families.json

Tiny random models of ``tests/zoo``, each built from its family's own arguments. What a family is
does not depend on the method; ``turboquant`` is asked here.
"""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from kvcompress.openblas import prefer_openblas

prefer_openblas()

from mlx.nn.layers.base import Module  # noqa: E402

from kvcompress import get_method  # noqa: E402
from kvcompress.cache.plan import make_plan, ranges  # noqa: E402
from kvcompress.cache.slot import Slot  # noqa: E402
from kvcompress.cache.trace import trace  # noqa: E402
from kvcompress.errors import UnsupportedModel  # noqa: E402
from tests.zoo import FAILING, FIELDS, tiny  # noqa: E402

COMMAND = "python -m benchmarks.families --out docs/results/families.json"


def row(family: str) -> dict[str, Any]:
    """What becomes of one family, as it stands in the results."""
    if family in FAILING:
        return {"family": family, "fate": "fails", "why": FAILING[family][1]}
    return {"family": family, **found(tiny(family))}


def found(model: Module) -> dict[str, Any]:
    """The fate of a model, its layers and the reasons for those that stay plain."""
    slots = trace(model)
    try:
        chosen = list(filter(make_plan(get_method("turboquant"), model).compresses, slots))
    except UnsupportedModel:
        chosen = []
    return {
        "fate": "compressed" if chosen else "refused",
        "layers": len({slot.index for slot in slots}),
        "compressed": sorted({slot.index for slot in chosen}),
        "at_rest": sorted({slot.index for slot in chosen if not slot.query_visible}),
        "rotation": sorted({_rotation(slot) for slot in chosen}),
        "why": _reasons([slot for slot in slots if slot not in chosen]),
    }


def _rotation(slot: Slot) -> str:
    if slot.layer is None or not slot.layer.rotary_known:
        return "unknown"
    return "none" if slot.layer.rotary is None else "known"


def _reasons(slots: list[Slot]) -> str:
    places: dict[str, list[int]] = {}
    for slot in slots:
        places.setdefault(slot.reason, []).append(slot.index)
    return "; ".join(f"{ranges(where)}: {reason}" for reason, where in places.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [row(family) for family in sorted(FIELDS, key=str.lower)]
    versions = {name: metadata.version(name) for name in ("mlx", "mlx-lm")}
    head = f'"command": {json.dumps(COMMAND)},\n"versions": {json.dumps(versions)}'
    lines = ",\n".join(json.dumps(each) for each in rows)  # a family a line, for who reads a diff
    text = f'{{{head},\n"rows": [\n{lines}\n]}}\n'
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
