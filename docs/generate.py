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
from collections import Counter
from pathlib import Path
from typing import Any

from kvcompress.compare import render
from kvcompress.compare.calibrated import embedded_layer
from kvcompress.compare.columns import COLUMNS
from kvcompress.compare.fitted import fitted
from kvcompress.compare.methods import method_of
from kvcompress.compare.render import markdown, piped
from kvcompress.compare.report import Report, Row
from kvcompress.compare.score_render import markdown as score_markdown
from kvcompress.compare.score_report import ScoreReport, ScoreRow
from kvcompress.compare.sized import made_up
from kvcompress.config import markdown_table
from kvcompress.registry import list_methods, method_class, method_info

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))  # for who loads this file by its path
from peer_tables import peers as peer_tables  # noqa: E402

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
    """The table of a committed comparison, and the command that makes it again."""
    report = _report(name)
    return (
        f"{markdown(report)}\nMeasured here, on two CPU cores: `{report.provenance['command']}`\n"
    )


def quality(name: str) -> str:
    """What a committed comparison says of quality alone, and the command that makes it again."""
    report = _report(name)
    titles = ("coded", "KL", "ΔNLL", "top-1", "recall", "copy")
    columns = [column for column in COLUMNS if column.title in titles]
    lines = render.markdown_table(report, columns)
    command = report.provenance["command"]
    return "\n".join([*lines, "", f"Measured here, on two CPU cores: `{command}`"]) + "\n"


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


def attention(name: str) -> str:
    """The table of ``benchmarks/attention.py``."""
    head = ("method", "D", "tokens", "plain float32, ms", "this, ms", "ratio", "quartiles")
    lines = [piped(head), piped(("---", *["---:"] * 6))]
    for row in _rows(name)["rows"]:
        numbers = (f"{row[key]:.2f}" for key in ("plain_ms", "codes_ms", "ratio"))
        sizes = (str(row["head_dim"]), f"{row['tokens']:,}")
        quartiles = "-".join(f"{x:.2f}" for x in row["ratio_quartiles"])
        lines.append(piped((f"`{row['method']}`", *sizes, *numbers, quartiles)))
    return "\n".join(lines) + "\n"


def outside(name: str) -> str:
    """The table of ``benchmarks/outside.py``."""
    rows = _rows(name)["rows"]
    head = ("method", "D", *(f"{tokens:,} tokens, ms" for tokens in rows[0]["tokens"]))
    lines = [piped(head), piped(("---", *["---:"] * (len(head) - 1)))]
    for row in rows:
        pairs = zip(row["milliseconds"], row["ratios"], strict=True)
        cells = (f"{ms:.2f} ({ratio:.2f})" for ms, ratio in pairs)
        lines.append(piped((f"`{row['method']}`", str(row["head_dim"]), *cells)))
    return "\n".join(lines) + "\n"


def steps(name: str) -> str:
    """The table of ``benchmarks/steps.py``."""
    data = _rows(name)
    context, prompt = f"{data['context']:,}", f"{data['prompt']:,}"
    head = ("method", f"a token at {context}, ms", f"generated at {context}, ms")
    lines = [piped((*head, f"tokens/s of a prompt of {prompt}")), piped(("---", *["---:"] * 3))]
    for row in data["rows"]:
        cells = [f"`{row['method']}`"]
        for what, unit in (
            ("decode", "ms"),
            ("generated", "ms"),
            ("prefill", "tokens_per_second"),
        ):
            plain, ours = row[f"{what}_{unit}"]
            cells.append(f"{ours:.0f}, plain {plain:.0f} ({row[f'{what}_speed']:.2f})")
        lines.append(piped(cells))
    return "\n".join(lines) + "\n"


def primitives(name: str) -> str:
    """The table of ``benchmarks/primitives.py``."""
    data = _rows(name)
    lines = [piped(("operation", "ns a number")), piped(("---", "---:"))]
    lines += [piped((what, f"{cost:.2f}")) for what, cost in data["nanoseconds"].items()]
    launch = f"{data['launch_microseconds']:.1f}"
    return "\n".join([*lines, "", f"One more operation, however small: {launch} µs."]) + "\n"


def memory(name: str) -> str:
    """The tables of ``benchmarks/memory.py``."""
    data = _rows(name)
    head = ("method", "predicted", "stored", "resident", "walked", "MLX's active", "smaller")
    lines = [piped(head), piped(("---", *["---:"] * 6))]
    for row in data["stored"]:
        parts = ("predicted", "stored", "resident", "walked", "active")
        sizes = (f"{row[f'{part}_bytes']:,}" for part in parts)
        lines.append(piped((f"`{row['method']}`", *sizes, f"{row['times_smaller']:.2f}x")))
    lengths = sorted({row["tokens"] for row in data["peak"]})
    lines += ["", piped(("method", *(f"peak MB, {n:,} tokens" for n in lengths)))]
    lines.append(piped(("---", *["---:"] * len(lengths))))
    for method in dict.fromkeys(row["method"] for row in data["peak"]):
        peaks = {r["tokens"]: r["peak_bytes"] for r in data["peak"] if r["method"] == method}
        lines.append(piped((f"`{method}`", *(f"{peaks[n] / 1e6:.1f}" for n in lengths))))
    return "\n".join(lines) + "\n"


def bands(name: str) -> str:
    """The table of ``benchmarks/bands.py``."""
    lines = [piped(("far keys meet the query by", "KL")), piped(("---", "---:"))]
    for row in _rows(name)["rows"]:
        lines.append(piped((row["rope"], f"{row['kl']:.4f} ±{row['kl_error']:.4f}")))
    return "\n".join(lines) + "\n"


def persistence(name: str) -> str:
    """The table of ``benchmarks/persistence.py``."""
    head = ("cache", "MB", "times smaller", "ms to save", "ms to load")
    lines = [piped(head), piped(("---", *["---:"] * 4))]
    for row in _rows(name)["rows"]:
        times = (f"{1e3 * row[f'{way}_seconds']:.0f}" for way in ("save", "load"))
        sizes = (f"{row['bytes'] / 1e6:.1f}", f"{row['times_smaller']:.1f}")
        lines.append(
            piped((f"`{row['cache']}`" if ":" in row["cache"] else row["cache"], *sizes, *times))
        )
    return "\n".join(lines) + "\n"


def serving(name: str) -> str:
    """The table of ``benchmarks/serving.py``, and the command that makes it again."""
    data = _rows(name)
    clients = tuple(data["rows"][0]["ratio"])
    rates = (f"tokens/s, {n} client{'s' * (n != '1')}" for n in clients)
    head = ("server", *rates, "first token: new, s", "kept, s", "MB kept")
    lines = [piped(head), piped(("---", *["---:"] * (len(head) - 1)))]
    for row in data["rows"]:
        rates = (f"{row['tokens_per_second'][n]:.1f} ({row['ratio'][n]:.2f}x)" for n in clients)
        firsts = (f"{row['first_token_seconds'][when]:.2f}" for when in ("new", "kept"))
        kept = f"{row['kept_bytes'] / row['conversations'] / 1e6:.1f}"
        lines.append(piped((f"`{row['server']}`", *rates, *firsts, kept)))
    made = f"medians of {data['rounds']}, answers of {data['answer_tokens']} tokens"
    lines += ["", f"Measured here, on two CPU cores, {made}: `{data['command']}`"]
    return "\n".join(lines) + "\n"


def families(name: str) -> str:
    """What becomes of mlx-lm's families, counted and one by one (``benchmarks/families.py``)."""
    data = _rows(name)
    rows = data["rows"]
    fates = Counter(row["fate"] for row in rows)
    whole = sum(row.get("compressed") == list(range(row.get("layers", 0))) for row in rows)
    versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
    lines = [
        f"Of {len(rows)} families ({versions}) {fates['compressed']} are compressed: {whole} in "
        f"every layer, {fates['compressed'] - whole} in some, whose other layers stay plain. "
        f"{fates['refused']} have no layer to compress and are refused. "
        f"{fates['fails']} do not run here, with mlx-lm's own caches either.",
        "",
        piped(("family", "layers compressed", "rotation of keys", "what stays plain")),
        piped(("---", "---", "---", "---")),
    ]
    for row in rows:
        if row["fate"] == "fails":
            lines.append(piped((f"`{row['family']}`", "does not run", "-", row["why"])))
            continue
        share = f"{len(row['compressed'])} of {row['layers']}"
        share = "refused" if row["fate"] == "refused" else share
        at_rest = f", {len(row['at_rest'])} at rest only" if row["at_rest"] else ""
        rotation = " or ".join(row["rotation"]) or "-"
        lines.append(piped((f"`{row['family']}`", share + at_rest, rotation, row["why"] or "-")))
    return "\n".join(lines) + f"\n\nFound by: `{data['command']}`\n"


def scores(name: str) -> str:
    """The tables of a committed comparison of scores, and the command that makes it again."""
    data = _rows(name)
    report = ScoreReport(**{**data, "rows": tuple(ScoreRow(**row) for row in data["rows"])})
    command = report.provenance["command"]
    return f"{score_markdown(report)}\nMeasured here: `{command}`\n"


def peers(name: str) -> str:
    """The tables of ``benchmarks/peers.py``."""
    return peer_tables(_rows(name))


def _report(name: str) -> Report:
    """A committed comparison without its times: a shared machine is never the same for two rows."""
    data = _rows(name)
    for row in data["rows"]:
        row["readings"].pop("decode_tokens_per_second", None)
    return Report(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


def _rows(name: str) -> dict[str, Any]:
    path = ROOT / "docs" / "results" / f"{name}.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


KINDS = {
    "results": results,
    "quality": quality,
    "options": options,
    "methods": methods,
    "attention": attention,
    "outside": outside,
    "steps": steps,
    "primitives": primitives,
    "memory": memory,
    "bands": bands,
    "persistence": persistence,
    "serving": serving,
    "scores": scores,
    "families": families,
    "peers": peers,
}


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
