"""``kvcompress compare``: methods side by side on a real model."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcompress.cli.chosen import ModelName

if TYPE_CHECKING:
    from kvcompress.compare import Protocol, Report
    from kvcompress.compare.score_report import ScoreReport

MODEL = "smollm2-135m"
TEXT = "prose-eval"
QUICK = "quick"
TIMEOUT = 3600.0


def compare(
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD[:OPTION=VALUE]...",
            help="A method to measure, beside the yardsticks; may be given several times. "
            "Several values make several rows: turboquant:bits=2,3,4.",
        ),
    ] = None,
    model: ModelName = MODEL,
    dtype: Annotated[
        str | None, typer.Option(help="Cast the model to float32, float16 or bfloat16.")
    ] = None,
    text: Annotated[str, typer.Option(help="prose-eval, code-eval, a file or a folder.")] = TEXT,
    protocol: Annotated[str, typer.Option(help="quick, standard or long.")] = QUICK,
    context: Annotated[
        int | None, typer.Option(help="Tokens read before the first scored one.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A calibration file, for the methods that take one; made where the embedded model "
            "lacks it."
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="table, md, csv or json; table on a terminal, else md."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the result to this file instead of stdout.")
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write the full report as JSON, too.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a row counts as hung.")
    ] = TIMEOUT,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Rows to measure at a time, in memory each with its model; what is timed runs "
            "alone. By default 2 of the embedded model on a CPU, else 1."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw quality against memory into this file; with --workload, errors by the age "
            "of the token."
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare errors of attention's scores instead: local_recency or "
            "long_range_dependent (made-up keys, no model), or recorded (the model's own). May be "
            "given several times."
        ),
    ] = None,
) -> None:
    """Measure methods on a real model: quality, memory, speed; one process a row.

    Exits with status 1 if a row failed.
    """
    from kvcompress.cli.output import deliver, format_of, must_be_apart, must_be_writable

    shape = format_of(format_, out)
    for path in (out, json_, plot):
        if path is not None:
            must_be_writable(path)
    must_be_apart({"--out": out, "--json": json_, "--plot": plot})
    if plot is not None:
        from kvcompress.compare.plot import check_suffix, require_matplotlib

        require_matplotlib()  # before the work, not after it
        check_suffix(plot)
    command = shlex.join(["kvcompress", *sys.argv[1:]])
    report: Report | ScoreReport
    if workload:
        from kvcompress.compare import score_render
        from kvcompress.compare.score_plot import save_score_plot
        from kvcompress.compare.scores import RECORDED, SCORE_METHODS, compare_scores

        _refuse_beside_workload(
            {
                "--protocol": protocol != QUICK,
                "--context": context is not None,
                "--calibration": calibration is not None,
                "--timeout": timeout != TIMEOUT,
                "--jobs": jobs is not None,
            }
        )
        if RECORDED not in workload:
            _refuse_beside_workload(
                {"--model": model != MODEL, "--dtype": dtype is not None, "--text": text != TEXT}
            )
        scores = compare_scores(
            workload, method or SCORE_METHODS, model=model, dtype=dtype, text=text, command=command
        )
        deliver(scores, shape, out, score_render.print_table, score_render.TEXT_FORMATS)
        report = scores
        if plot is not None:
            save_score_plot(scores, plot)
    else:
        from kvcompress.compare import DEFAULT_METHODS, render
        from kvcompress.compare import compare as run
        from kvcompress.compare.plot import save_plot
        from kvcompress.compare.progress import Progress

        measured = run(
            method or DEFAULT_METHODS,
            model=model,
            dtype=dtype,
            text=text,
            protocol=_protocol(protocol, context),
            calibration=None if calibration is None else str(calibration),
            row_seconds=timeout,
            jobs=jobs,
            command=command,
            observer=Progress(),
        )
        deliver(measured, shape, out, render.print_table, render.TEXT_FORMATS)
        report = measured
        if plot is not None:
            save_plot(measured, plot)
    if json_ is not None:
        json_.write_text(report.to_json(), encoding="utf-8")
    if report.failed:
        raise typer.Exit(1)


def _refuse_beside_workload(given: dict[str, bool]) -> None:
    """Refuse options that would be without effect."""
    from kvcompress.errors import ConfigError

    for option, there in given.items():
        if there:
            raise ConfigError(f"compare: {option} has no part in this --workload; leave it out")


def _protocol(name: str, context: int | None) -> Protocol:
    import attrs

    from kvcompress.compare.protocol import PROTOCOLS
    from kvcompress.errors import ConfigError

    if name not in PROTOCOLS:
        raise ConfigError(
            f"compare: --protocol must be one of {', '.join(PROTOCOLS)} (got {name!r})"
        )
    chosen = PROTOCOLS[name]
    return chosen if context is None else attrs.evolve(chosen, context=context)
