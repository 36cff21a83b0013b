"""kvcompress beside what else a user of mlx-lm could take, on the embedded model, in one run.

    pip install "kvcompress[cpu]"            # or kvcompress on macOS
    pip install -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py --context 512 2048 8192 --out docs/results/peers.json

Every row runs in processes of its own, one after another, with the same model, text, context and
threads. A package that is not installed, and a row that fails, are rows that say so. Peers that
want calibrating get activations of the text and length that kvcompress's methods are fitted to,
and the first tokens of each window too, which they must code. Tables are fitted once, before and
apart from what is measured.

Columns: all-in bits a value, and with tables; bits of a coded value, as the package states them
where it does; resident MB by walking the objects, and MB by MLX's active memory; peak MB;
divergence from the first row, top-1, recall and copying; ms a decode step and its attention; tokens
read a second; microseconds to encode a token. Tables are what caches hold before their first token,
whoever's they are.

Times are taken in rounds through all rows. The report has the median, least and most of a row's
rounds, and the same of its ratios to the first row in the same round, so that a machine that slows
down meets both. A context that would leave the model no positions for what is scored is shortened.

The report is written after every row. A run that is started again with the same ``--out`` goes on
where it was interrupted, and adds rows that the file does not have.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import attrs
from attrs import define
from peer_processes import Runner
from peer_progress import Progress, line
from peer_rows import PLAIN, subjects
from peer_store import Store, put, row_of, with_round

from kvcompress.calibrate.demo import TOKENS
from kvcompress.compare.protocol import Protocol
from kvcompress.compare.provenance import machine, versions
from kvcompress.models.embedded import ensure_demo_model

POSITIONS = 8192
"""Of the embedded model."""


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


@define
class Bench:
    """Measures the rows of one context, and keeps what it has after each.

    Attributes:
        run: The run that rows are added to.
        labels: The rows that are asked for, the plain one first.
        rounds: Times that each is timed.
        runner: Runs a row's processes.
        store: Writes the report.
    """

    run: dict[str, Any]
    labels: list[str]
    rounds: int
    runner: Runner
    store: Store

    def measure(self) -> None:
        """Measure what the run lacks of rows and rounds."""
        lacking = [self._lacking(turn) for turn in range(self.rounds)]
        progress = Progress(self.run["protocol"]["context"], lacking)
        for turn in range(self.rounds):
            plain: dict[str, float] = {}
            for label in self._lacking(turn):
                row = row_of(self.run, label)
                # What others are held against is made anew, though the report may have it.
                first = row is None or (label == PLAIN and turn == 0)
                with progress.row(turn, label):
                    answer = self.runner.run(label, self.run["protocol"], first=first)
                plain = plain or answer["times"]
                if label != PLAIN or self._lacks(turn, label):
                    self._keep(row or started(label, answer), answer, plain)

    def _lacking(self, turn: int) -> list[str]:
        """The rows to run in a round: the plain one too, for others are held against it."""
        others = [label for label in self.labels if self._lacks(turn, label)]
        return [PLAIN, *(label for label in others if label != PLAIN)] if others else []

    def _lacks(self, turn: int, label: str) -> bool:
        """A row that failed is not tried again in a later round or run."""
        row = row_of(self.run, label)
        return row is None or (len(row["rounds"]) <= turn and not row["errors"])

    def _keep(self, row: dict[str, Any], answer: dict[str, Any], plain: dict[str, float]) -> None:
        row = {
            **row,
            "errors": {**row["errors"], **answer["errors"]},
            "seconds": row["seconds"] + answer["seconds"],
        }
        if answer["times"]:
            row = with_round(row, answer["times"], plain)
        self.run["subject"] = self.run["subject"] or answer.get("subject")
        read = answer.get("read_bytes_per_second", 0.0)
        self.run["read_bytes_per_second"] = max(self.run["read_bytes_per_second"], read)
        put(self.run, row, list(subjects()))
        self.store.write()
        print(line(row), flush=True)


def started(label: str, answer: dict[str, Any]) -> dict[str, Any]:
    """A row before anything of it is kept but what it measured."""
    about = subjects()[label]
    return {
        "row": label,
        "package": about.package,
        "version": answer.get("version", ""),
        "config": about.config,
        "note": about.note,
        "measures": answer["measures"],
        "rounds": [],
        "times": {},
        "ratios": {},
        "errors": {},
        "warnings": answer.get("warnings", []),
        "without_retrieval": answer.get("without_retrieval", ""),
        "seconds": 0.0,
    }


def chosen(args: argparse.Namespace) -> list[str]:
    """The labels of the rows that are asked for."""
    return [
        label
        for label in subjects()
        if label == PLAIN
        or (
            any(word in label for word in args.only)
            and not any(word in label for word in args.without)
        )
    ]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What rows of one report have in common."""
    return {
        "versions": versions(),
        **machine(),
        "cores": os.cpu_count(),
        "text": args.text,
        "calibration_tokens": args.calibration_tokens,
        "steps": args.steps,
        "threads": args.threads or "default",
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, help="the report, which is gone on with if it is there")
    add("--fresh", action="store_true", help="forget what is in the report")
    add("--again", action="store_true", help="measure the chosen rows again")
    add("--only", nargs="+", default=[""], help="rows with one of these words")
    add("--without", nargs="+", default=[], help="no rows with one of these words")
    add("--list", action="store_true", help="name the rows and stop")
    add("--context", type=int, nargs="+", default=[512, 2048, 8192])
    add("--scored", type=int, default=256, help="tokens scored in each window")
    add("--windows", type=int, default=2)
    add("--retrieval", type=int, help="tokens of the retrieval prompt; 0: none")
    add("--rounds", type=int, default=3, help="times that each row is timed, all rows in turn")
    add("--steps", type=int, default=16, help="single tokens that are timed in a round")
    add("--calibration-tokens", type=int, default=TOKENS, help="for peers")
    add("--text", default="prose-eval")
    add("--threads", type=int, default=0, help="of OpenBLAS; 0: its own choice")
    add("--row-seconds", type=float, default=7200, help="that a process may take")
    add("--work", type=Path, help="folder that keeps fitted tables for another run")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    labels = chosen(args)
    if args.list:
        print("\n".join(labels))
        return
    ensure_demo_model()
    store = Store.open(args.out, settings(args), fresh=args.fresh)
    with tempfile.TemporaryDirectory(prefix="kvcompress-peers-") as name:
        folder = args.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        runner = Runner(args, folder, Path(name))
        for context in args.context:
            run = store.run_of(attrs.asdict(protocol_of(context, args)))
            if args.again:
                run["rows"] = [row for row in run["rows"] if row["row"] not in labels]
            Bench(run, labels, args.rounds, runner, store).measure()


if __name__ == "__main__":
    main()
