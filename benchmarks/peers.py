"""kvcompress beside what else a user of mlx-lm could take, on the embedded model, in one run.

    pip install "kvcompress[cpu]"            # or kvcompress on macOS
    pip install -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py --context 512 2048 8192 --out docs/results/peers.json

Every row runs in a process of its own, one after another, with the same model, text, context and
threads. A package that is not installed, and a row that fails, are rows that say so. Peers that
want calibrating get activations of the text and length that kvcompress's methods are fitted to.

Columns: all-in bits a value (and with tables); resident MB by walking the objects and by MLX's
active memory; peak MB; divergence from the first row, top-1, recall and copying; ms a decode step
and its attention; tokens read a second; microseconds to encode a token. Times are medians; ratios
are to the first row of the same context. A context that would leave the model no positions for
what is scored is shortened, and the report says to what.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
from peer_adapters import PLAIN, subjects

from kvcompress.calibrate.demo import TOKENS
from kvcompress.compare.protocol import Protocol
from kvcompress.compare.provenance import machine, versions
from kvcompress.models.embedded import NAME, ensure_demo_model

POSITIONS = 8192
"""Of the embedded model."""

RATIOS = (
    "resident_bytes",
    "active_bytes",
    "peak_bytes",
    "step_ms",
    "attention_ms",
    "prefill_tokens_per_second",
    "encode_us_per_token",
)
COLUMNS = {
    "bits": ("bits_per_value", 1),
    "+tables": ("bits_per_value_with_tables", 1),
    "MB": ("resident_bytes", 1e6),
    "active MB": ("active_bytes", 1e6),
    "peak MB": ("peak_bytes", 1e6),
    "KL": ("kl", 1),
    "top-1": ("top1", 1),
    "recall": ("retrieval_recall", 1),
    "copy": ("retrieval_copy", 1),
    "step ms": ("step_ms", 1),
    "attn ms": ("attention_ms", 1),
    "read/s": ("prefill_tokens_per_second", 1),
    "enc us": ("encode_us_per_token", 1),
}


def protocol_of(context: int, args: argparse.Namespace) -> Protocol:
    """The protocol for a context, which leaves room for what follows it."""
    room = POSITIONS - args.scored - args.steps - 1
    asked = args.retrieval
    return Protocol(
        name="peers",
        context=min(context, room),
        windows=args.windows,
        scored=args.scored,
        retrieval=min(max(context, 768), 4096) if asked is None else asked,
        decode=0,
    )


def run_row(label: str, protocol: Protocol, args: argparse.Namespace, folder: Path) -> Any:
    """Measure a row in a fresh process."""
    job, answer = folder / "job.json", folder / "answer.json"
    job.write_text(
        json.dumps(
            {
                "row": label,
                "model": NAME,
                "text": args.text,
                "protocol": attrs.asdict(protocol),
                "reference": str(folder / "reference.f32"),
                "samples": str(folder / "samples.pickle"),
                "calibration_tokens": args.calibration_tokens,
                "steps": args.steps,
                "repeats": args.repeats,
            }
        ),
        encoding="utf-8",
    )
    answer.unlink(missing_ok=True)
    worker = str(Path(__file__).with_name("peer_worker.py"))
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(args.threads))
    try:
        done = subprocess.run(
            [sys.executable, worker, str(job), str(answer)],
            env={**os.environ, **(threads if args.threads else {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=args.row_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failed(label, f"not done after {args.row_seconds:.0f} s")
    if done.returncode == 0 and answer.exists():
        return json.loads(answer.read_text(encoding="utf-8"))
    code = done.returncode
    end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return failed(label, ": ".join([end, *done.stderr.strip().splitlines()[-1:]]))


def failed(label: str, error: str) -> dict[str, Any]:
    """A row without numbers."""
    about = subjects()[label]
    return {
        "row": label,
        "package": about.package,
        "config": about.config,
        "note": about.note,
        "measures": {},
        "readings": {},
        "errors": {"row": error},
    }


def with_ratios(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """A row with its numbers over those of the plain row."""
    mine, its = ({**one["measures"], **one["readings"]} for one in (row, first))
    ratios = {name: mine[name] / its[name] for name in RATIOS if mine.get(name) and its.get(name)}
    return {**row, "ratios": ratios}


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    numbers = {**row["measures"], **row["readings"]}
    cells = []
    for title, (name, unit) in COLUMNS.items():
        value = numbers.get(name)
        cells.append(f"{title} {'-' if value is None else f'{value / unit:.4g}'}")
    errors = [f"{part}: {text}" for part, text in row["errors"].items()]
    return f"{row['row']:45s} " + ", ".join([*cells, *errors])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--scored", type=int, default=256, help="tokens scored in each window")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--retrieval", type=int, help="tokens of the retrieval prompt; 0: none")
    parser.add_argument("--steps", type=int, default=16, help="single tokens that are timed")
    parser.add_argument("--repeats", type=int, default=3, help="times that a context is read")
    parser.add_argument("--calibration-tokens", type=int, default=TOKENS, help="for peers")
    parser.add_argument("--text", default="prose-eval")
    parser.add_argument("--threads", type=int, default=0, help="of OpenBLAS; 0: its own choice")
    parser.add_argument("--row-seconds", type=float, default=7200)
    parser.add_argument("--only", nargs="+", default=[""], help="rows with one of these words")
    args = parser.parse_args()
    ensure_demo_model()
    labels = [
        label for label in subjects() if label == PLAIN or any(word in label for word in args.only)
    ]
    runs = []
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="kvcompress-peers-") as name:
        for context in args.context:
            protocol = protocol_of(context, args)
            rows: list[dict[str, Any]] = []
            for label in labels:
                row = run_row(label, protocol, args, Path(name))
                rows.append(with_ratios(row, rows[0] if rows else row))
                print(line(rows[-1]), flush=True)
            about = next((row["subject"] for row in rows if "subject" in row), None)
            for row in rows:
                row.pop("subject", None)
            runs.append({"protocol": attrs.asdict(protocol), "subject": about, "rows": rows})
            if args.out:  # after each context, since a run is long
                write(args, started, runs)


def write(args: argparse.Namespace, started: str, runs: list[dict[str, Any]]) -> None:
    """Write the report of the contexts so far."""
    result = {
        "schema_version": 1,
        "provenance": {
            "versions": versions(),
            **machine(),
            "calibration_tokens": args.calibration_tokens,
            "steps": args.steps,
            "repeats": args.repeats,
            "threads": args.threads or "default",
            "cores": os.cpu_count(),
        },
        "started": started,
        "runs": runs,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
