from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).parents[1] / "docs" / "peer_tables.py"


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_tables", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(label: str, bits: float, kl: float | None, step_ms: float) -> dict[str, Any]:
    measures = {"bits_per_value": bits, "kl": kl, "table_bytes": 100}
    times = {"step_ms": [step_ms] * 3, "held_bytes": [900] * 3}
    return {
        "row": label,
        "package": "",
        "version": "",
        "note": "",
        "measures": measures,
        "times": times,
        "ratios": {"step_ms": [step_ms / 10, 0.5, 2.0]},
        "rounds": [{}, {}],
        "errors": {},
    }


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    run = {
        "protocol": {"context": 512, "scored": 64, "windows": 2},
        "subject": {"model": {"name": "m", "dtype": "float32"}, "weight_bytes": 9_000},
        "read_bytes_per_second": 1e6,
        "rows": rows,
    }
    settings = {"versions": {"mlx": "1"}, "cores": 2, "text": "prose", "threads": "default"}
    return {"settings": settings, "runs": [run]}


ROWS = [
    row("mlx-lm KVCache float32", 32, 0.0, 10),
    row("kvcompress small", 4, 0.2, 20),
    row("kvcompress large", 8, 0.1, 5),
]


def cells(text: str, label: str) -> list[str]:
    [line] = (line for line in text.splitlines() if line.startswith(f"| `{label}` | 2 |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_cell_is_ahead_if_it_beats_all_that_keep_no_more_bits() -> None:
    peers = tables().peers
    better = peers(report([*ROWS, row("peer p", 6, 0.15, 20)]))
    assert "- `peer p`, 6.0 bits: KL 0.1500 (`small`: 0.2000)\n" in better
    worse = peers(report([*ROWS, row("peer p", 8, 0.1, 5)]))
    assert "`peer p`, " not in worse
    assert "- no cell" in worse


def test_where_nothing_is_as_small_every_cell_counts() -> None:
    text = tables().peers(report([*ROWS, row("peer p", 2, 9.0, 99)]))
    assert (
        "- `peer p`, 2.0 bits (nothing of kvcompress is as small): KL 9.0000; step, ms 99.0" in text
    )


def test_what_was_not_measured_is_no_win() -> None:
    text = tables().peers(report([*ROWS, row("peer p", 6, None, 30)]))
    assert "`peer p`, " not in text


def test_the_limit_is_what_must_be_read_at_the_speed_of_memory() -> None:
    text = tables().peers(report(ROWS))
    # 9,000 bytes of weights and 1,000 of cache at 1e6 bytes a second are 10 ms.
    assert cells(text, "kvcompress small")[2:4] == ["20.0 (2.00: 0.50 to 2.00)", "2.0"]


def test_failures_and_notes_stand_below_the_tables() -> None:
    bad = {**row("peer p", 6, None, 30), "errors": {"fit": "no GPU"}, "note": "a note"}
    text = tables().peers(report([*ROWS, bad]))
    assert "- `peer p` failed (fit): no GPU" in text
    assert "- `peer p`: a note." in text
