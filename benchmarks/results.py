"""What a benchmark found, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def deliver(result: dict[str, Any], out: Path | None) -> None:
    """Print a result, and write it to a file if one is named."""
    text = json.dumps(result, indent=2) + "\n"
    if out:
        out.write_text(text, encoding="utf-8")
    print(text)
