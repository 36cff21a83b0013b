"""``kvcompress serve``: mlx-lm's server with compressed caches."""

from __future__ import annotations

import typer

from kvcompress.cli.chosen import CalibrationFile, MethodWords, ModelName, chosen_method


def serve(
    context: typer.Context,
    method: MethodWords = "turboquant",
    model: ModelName = "smollm2-135m",
    calibration: CalibrationFile = None,
) -> None:
    """Run mlx-lm's server; it reads every other flag (see mlx_lm.server --help)."""
    from kvcompress.openblas import prefer_openblas

    prefer_openblas()  # before anything imports mlx

    chosen = chosen_method(method, calibration, model)

    from kvcompress.cli.serving import run_server

    run_server(chosen, ["--model", model, *context.args])
