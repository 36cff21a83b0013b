"""``kvcompress serve``: mlx-lm's server with compressed caches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    context: typer.Context,
    method: Annotated[
        str, typer.Option(metavar="METHOD[:OPTION=VALUE]...", help="The method, with options.")
    ] = "turboquant",
    model: Annotated[
        str, typer.Option(help="smollm2-135m (fetched once), a folder, or a hub name.")
    ] = "smollm2-135m",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A calibration file, for a method that takes one; made where the embedded model "
            "lacks it."
        ),
    ] = None,
) -> None:
    """Run mlx-lm's server; it reads every other flag (see mlx_lm.server --help)."""
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()  # before anything imports mlx

    from kvcompress.cli.chosen import chosen_method

    chosen = chosen_method(method, None if calibration is None else str(calibration), model)

    from kvcompress.cli.serving import run_server

    run_server(chosen, ["--model", model, *context.args])
