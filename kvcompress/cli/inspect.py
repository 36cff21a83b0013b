"""``kvcompress inspect``: what a method is and which options it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvcompress.cli.options import MethodSpec


def inspect(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A method: NAME[:OPTION=VALUE]...")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Show a method: its paper, what it can do, its options; values given are checked."""
    from kvcompress.cli.options import parse_method
    from kvcompress.errors import ConfigError

    specs = parse_method(method)
    if len(specs) > 1:
        raise ConfigError(f"inspect shows one configuration; {method!r} stands for {len(specs)}")
    description = _describe(specs[0])
    if as_json:
        import json

        print(json.dumps(description, indent=2))
    else:
        _show(description)


def _describe(spec: MethodSpec) -> dict[str, Any]:
    from kvcompress.config import options_of
    from kvcompress.errors import CalibrationRequired
    from kvcompress.registry import get_method, method_class, method_info

    info = method_info(spec.name)
    options = options_of(method_class(spec.name))
    values = {option.name: option.encode(option.default) for option in options}
    try:
        values |= get_method(spec.name, **spec.options).config()
    except CalibrationRequired:
        # The calibration is not made yet; the options can be shown all the same.
        given = [option for option in options if option.name in spec.options]
        values |= {option.name: option.encode(spec.options[option.name]) for option in given}
    return {
        "name": info.name,
        "summary": info.summary,
        "paper": info.paper,
        "needs_calibration": info.needs_calibration,
        "capabilities": sorted(info.capabilities),
        "options": [
            {
                "name": option.name,
                "value": values[option.name],
                "default": option.encode(option.default),
                "legal": option.legal,
                "help": option.help,
            }
            for option in options
        ],
    }


def _show(description: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(f"{description['name']}: {description['summary']}"))
    if description["paper"]:
        console.print(Text(f"paper: {description['paper']}"))
    console.print(f"needs calibration: {'yes' if description['needs_calibration'] else 'no'}")
    console.print(Text(f"capabilities: {', '.join(description['capabilities']) or 'none'}"))
    table = Table("option", "value", "default", "legal", "meaning")
    for option in description["options"]:
        cells = (
            option["name"],
            option["value"],
            option["default"],
            option["legal"],
            option["help"],
        )
        table.add_row(*(Text(str(cell)) for cell in cells))
    console.print(table)
