"""Fill the generated parts of the documentation: options, results, errors.

    python docs/generate.py            write them
    python docs/generate.py --check    fail where a page is out of date

A generated part stands between ``<!-- generated: KIND ARGUMENT -->`` and ``<!-- end -->``.
Results come from the JSON of a comparison (``kvcompress compare --json docs/results/NAME.json``).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from kvcompress.compare.render import markdown
from kvcompress.compare.report import Report, Row
from kvcompress.config import markdown_table
from kvcompress.registry import method_class

ROOT = Path(__file__).parents[1]
PART = re.compile(r"(<!-- generated: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def results(name: str) -> str:
    """The table of a committed comparison, and the command that makes it again."""
    data = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    report = Report(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})
    command = report.provenance["command"]
    return f"{markdown(report)}\nMeasured here, on two CPU cores: `{command}`\n"


def options(name: str) -> str:
    """The table of a method's options, from their declarations."""
    return markdown_table(method_class(name)) + "\n"


KINDS = {"results": results, "options": options}


def filled(text: str) -> str:
    """A page with its generated parts made anew."""
    return PART.sub(lambda m: m[1] + "\n" + KINDS[m[2]](m[3]).strip() + "\n\n" + m[4], text)


def pages() -> list[Path]:
    """Every page that may have generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(check: bool) -> int:
    """Write or check all pages; the number of those that were out of date when checking."""
    stale = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new == text:
            continue
        stale += 1
        if check:
            print(f"{page.relative_to(ROOT)} is out of date: run python docs/generate.py")
        else:
            page.write_text(new, encoding="utf-8")
    return stale if check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
