"""``kvcompress calibrate``: fit methods to a model and a text, and write the calibration file."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from kvcompress.calibrate.calibration import Calibration, Fit

MODEL = "smollm2-135m"


def calibrate(
    method: Annotated[
        list[str],
        typer.Option(
            metavar="METHOD",
            help="What to fit: NAME[:OPTION=VALUE]..., or several bare names with commas between. "
            "May be given again.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    model: Annotated[str, typer.Option(help="smollm2-135m, a folder or a hub name.")] = MODEL,
    text: Annotated[
        str, typer.Option(help="prose-calibration, code-calibration, a file or a folder.")
    ] = "prose-calibration",
    tokens: Annotated[int, typer.Option(help="Tokens to read at most.")] = 16384,
    seed: Annotated[int, typer.Option(help="For the sample and the fits.")] = 0,
) -> None:
    """Fit the tables of methods to a model and a text, and write them to a file."""
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()

    from kvcompress.calibrate.api import calibrate as run
    from kvcompress.calibrate.api import configured
    from kvcompress.calibrate.file import check_writable
    from kvcompress.cli.told import told
    from kvcompress.errors import ConfigError
    from kvcompress.models import load_model
    from kvcompress.text import load_text

    # What can be wrong in the call is found before minutes are spent.
    check_writable(out)
    methods = configured(split_names(method))
    if not methods:
        raise ConfigError(f"calibrate: --method names no method (got {', '.join(method)!r})")
    source = load_text(text)
    loaded = load_model(model)
    with told() as progress:
        calibration = run(
            loaded.model,
            loaded.tokenizer,
            source,
            methods,
            seed=seed,
            tokens=tokens,
            progress=progress,
        )
    calibration.save(out)
    _show(calibration, out, tokens)


def split_names(words: list[str]) -> list[str]:
    """Split bare names at commas; with options, a comma separates an option's values."""
    return [part for word in words for part in ([word] if ":" in word else word.split(",")) if part]


def _show(calibration: Calibration, out: Path, asked: int) -> None:
    from rich.console import Console

    console = Console()
    read = calibration.provenance["tokens"]
    # Windows need not add up to the last few tokens that were asked for.
    ended = f" of {asked:,} asked for: the text has no more" if asked - read >= 64 else ""
    if calibration.fits:
        console.print(fit_table(calibration))
        console.print(
            "Errors are of tokens that were not fitted to, as a share of their variance: "
            "the median layer's, and the worst."
        )
    console.print(
        f"{len(calibration.layers)} layers, {read:,} tokens{ended}, "
        f"recorded in {calibration.seconds:.0f} s",
        highlight=False,
    )
    console.print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)


def fit_table(calibration: Calibration) -> Table:
    """The fit report, one row a method and set of options."""
    from rich.table import Table
    from rich.text import Text

    columns = ("method", "fitted for", "key error", "value error", "dead centroids", "seconds")
    table = Table(*columns)
    for fit in calibration.fits:
        dead = [row["dead_centroids"] for row in fit.report.values() if "dead_centroids" in row]
        table.add_row(
            Text(fit.key.method),
            Text(fit.key.settings),
            _spread_of(fit, "key"),
            _spread_of(fit, "value"),
            f"{sum(dead):.0f}" if dead else "-",
            f"{fit.seconds:.0f}",
        )
    return table


def _spread_of(fit: Fit, part: str) -> str:
    """Median and worst layer of the relative error."""
    shares = {
        index: row[f"{part}_error"] / row[f"{part}_spread"]
        for index, row in fit.report.items()
        if row[f"{part}_spread"] > 0
    }
    if not shares:
        return "-"
    worst = max(shares, key=lambda index: shares[index])
    return f"{100 * median(shares.values()):.3g}% (layer {worst}: {100 * shares[worst]:.3g}%)"
