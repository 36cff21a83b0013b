"""The command line: one file per command, and only the command asked for is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated, Any, Final

import typer
from typer.main import get_command

from kvcompress._version import __version__
from kvcompress.errors import KVCompressError

COMMANDS: dict[str, tuple[str, str]] = {
    "methods": ("kvcompress.cli.methods:methods", "List the installed methods."),
    "inspect": ("kvcompress.cli.inspect:inspect", "Show a method and its options."),
    "doctor": ("kvcompress.cli.doctor:doctor", "Check the set-up and a model's layers."),
    "estimate": ("kvcompress.cli.estimate:estimate", "Tell how many bytes a cache will take."),
    "compare": ("kvcompress.cli.compare:compare", "Measure methods on a real model."),
    "calibrate": (
        "kvcompress.cli.calibrate:calibrate",
        "Fit the tables of methods that need them.",
    ),
    "generate": ("kvcompress.cli.generate:generate", "Write text with a compressed cache."),
    "serve": ("kvcompress.cli.serve:serve", "Run mlx-lm's server with compressed caches."),
}
"""Every command: where its function stands, and its line in ``kvcompress --help``."""

HANDING_ON: Final = frozenset({"serve"})
"""Commands that hand the words they do not know to another program."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 when all went well, 2 on a mistake in the call.

    Args:
        args: The words after the program's name; those of the process by default.

    Raises:
        SystemExit: Always, unless ``--debug`` lets an error of kvcompress pass.
    """
    words = list(sys.argv[1:] if args is None else args)
    flags = list(takewhile(lambda word: word.startswith("-"), words))
    selected = next(iter(words[len(flags) :]), None)
    try:
        get_command(build_app(selected))(args=words, prog_name="kvcompress")
    except KVCompressError as error:
        if "--debug" in flags:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def build_app(selected: str | None = None) -> typer.Typer:
    """Build the Typer application, in which only the command ``selected`` can be run.

    The others appear in the help with their line of :data:`COMMANDS`, and stay unimported.
    """
    app = typer.Typer(
        help="Compressed KV caches for language models run with mlx-lm.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an error.")
        ] = False,
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                callback=_show_version,
                is_eager=True,
                help="Show the version and exit.",
            ),
        ] = False,
    ) -> None:
        pass

    for name, (target, line) in COMMANDS.items():
        if name == selected:
            loose = name in HANDING_ON
            settings = {"allow_extra_args": loose, "ignore_unknown_options": loose}
            app.command(name, context_settings=settings)(_load(target))
        else:
            # Only its name and its line are needed: another command is being run, or the help.
            app.command(name, help=line)(lambda: None)
    return app


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _show_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit
