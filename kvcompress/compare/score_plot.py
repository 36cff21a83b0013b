"""A picture of a comparison of scores: how the error grows with a token's age."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvcompress.compare.plot import require_matplotlib, save
from kvcompress.compare.score_errors import AGE
from kvcompress.compare.score_report import ScoreReport, ScoreRow
from kvcompress.errors import ConfigError


def save_score_plot(report: ScoreReport, path: Path) -> None:
    """Draw errors of scores by the age of the token, one panel a workload and length; save it.

    Args:
        report: The comparison; rows that failed are left out.
        path: Where to; the suffix says which kind of file.

    Raises:
        ConfigError: matplotlib is missing, there is nothing to draw, or the file cannot be
            written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    panels: dict[tuple[str, int], list[ScoreRow]] = {}
    for row in report.rows:
        if not row.error:
            panels.setdefault((row.workload, row.tokens), []).append(row)
    if not panels:
        raise ConfigError("plot: every row failed; nothing to draw")
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    several = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, ((workload, tokens), rows) in zip(several, panels.items(), strict=True):
        for row in rows:
            ages = by_age(row.measures)
            axes.plot(list(ages), list(ages.values()), marker="o", label=row.method)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("age of the token: it and up to twice as old")
        axes.set_title(f"{workload}, {tokens} tokens", fontsize="medium")
        axes.grid(which="both", alpha=0.3)
    several[0].set_ylabel("mean squared error of scores")
    lines = {line.get_label(): line for axes in several for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", fontsize="small")
    save(figure, path)


def by_age(measures: Mapping[str, float | None]) -> dict[int, float]:
    """The errors of a row that are not zero, by the least age of their tokens."""
    return {
        int(name.removeprefix(AGE)): value
        for name, value in measures.items()
        if name.startswith(AGE) and value
    }
