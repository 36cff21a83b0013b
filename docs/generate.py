"""Fill the generated parts of the documentation: options, results, errors.

    python docs/generate.py            write them
    python docs/generate.py --check    fail where a page is out of date

A generated part stands between ``<!-- generated: KIND ARGUMENT -->`` and ``<!-- end -->``.
Results come from the JSON of a comparison (``kvcompress compare --json docs/results/NAME.json``).
What the table of methods says of each beside its own description stands in :data:`ADVICE`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from kvcompress.compare.calibrated import embedded_layer
from kvcompress.compare.fitted import fitted
from kvcompress.compare.methods import method_of
from kvcompress.compare.render import markdown, piped
from kvcompress.compare.report import Report, Row
from kvcompress.compare.sized import made_up
from kvcompress.config import markdown_table
from kvcompress.registry import list_methods, method_class, method_info

ROOT = Path(__file__).parents[1]
PART = re.compile(r"(<!-- generated: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

ADVICE = {
    "turboquant": "there is room for fewer than 2 bits: codes of whole vectors do better there",
    "vecinfer": "there is no text to calibrate on, or room for more than 2 bits",
    "commvq": "as for `vecinfer`; or the rotation of a layer is not known (it says so)",
    "a2ats": "as for `vecinfer`; or the rotation of a layer is not known (it says so)",
    "affine": "memory counts: `turboquant` errs less at the same size",
    "fp16": "memory counts at all",
}
"""When to look elsewhere, for each method that comes with kvcompress, in the table's order."""


def results(name: str) -> str:
    """The table of a committed comparison, and the command that makes it again.

    Without times: rows run one after the other, and a shared machine is never the same for two.
    """
    data = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    for row in data["rows"]:
        row["readings"].pop("decode_tokens_per_second", None)
    report = Report(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})
    command = report.provenance["command"]
    return f"{markdown(report)}\nMeasured here, on two CPU cores: `{command}`\n"


def options(name: str) -> str:
    """The table of a method's options, from their declarations."""
    return markdown_table(method_class(name)) + "\n"


def methods(distribution: str) -> str:
    """The table of a distribution's methods: what each saves, needs and is not for."""
    installed = {row.name for row in list_methods() if row.distribution == distribution}
    if installed != set(ADVICE):
        raise SystemExit(f"ADVICE is to have {sorted(installed)} (it has {sorted(ADVICE)})")
    head = ("method", "what it is", "bits a number", "smaller", "first", "look elsewhere when")
    lines = [piped(head), piped(("---", "---", "---:", "---:", "---", "---"))]
    for name, advice in ADVICE.items():
        info = method_info(name)
        page = ROOT / "docs" / "methods" / f"{name}.md"
        bits = coded_bits(name)
        cells = (
            f"[{name}]({page.name})" if page.exists() else f"`{name}`",
            info.summary,
            "as in the model" if bits is None else f"{bits:.2f}",
            "-" if bits is None else f"{16 / bits:.1f}x",
            "[calibrate](../how-to/calibrate.md)" if info.needs_calibration else "nothing",
            advice,
        )
        lines.append(piped(cells))
    return "\n".join(lines) + "\n"


def coded_bits(name: str) -> float | None:
    """Bits that a coded token takes for each number of the embedded model's cache, by default."""
    if "plain" in method_info(name).capabilities:  # it keeps the model's own caches
        return None
    layer = embedded_layer()
    calibration = fitted(method_of(name), [made_up(layer)])
    codec = method_of(name, calibration).bind(layer)
    numbers = layer.kv_heads * (layer.head_dim + layer.value_dim)
    return 8 * codec.schema.bytes_per_token / numbers


KINDS = {"results": results, "options": options, "methods": methods}


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
