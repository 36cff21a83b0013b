"""``kvcompress methods``: what is installed, and what of it works."""

from __future__ import annotations

from typing import Annotated

import typer

STYLES = {"ok": "green", "broken": "red", "conflict": "yellow", "incompatible": "yellow"}


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """List the installed methods, with what is wrong with those that do not work."""
    from kvcompress.registry import list_methods

    rows = list_methods()
    if as_json:
        import json

        import attrs

        print(json.dumps([attrs.asdict(row) for row in rows], indent=2))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("method", "status", "from", "summary")
    for row in rows:
        about = "\n".join(line for line in (row.summary, row.paper, row.detail) if line)
        table.add_row(
            Text(row.name),
            Text(row.status, style=STYLES[row.status]),
            Text(f"{row.distribution} {row.version}".strip()),
            Text(about),
        )
    Console().print(table)
