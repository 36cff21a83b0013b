"""A picture of a comparison: quality against memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcompress.compare.render import title
from kvcompress.compare.report import Report, Row
from kvcompress.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

YARDSTICK: Final = "affine"
"""The method drawn as the line to beat."""


def save_plot(report: Report, path: Path) -> None:
    """Draw KL against bits per value, one line a method, and save it.

    Args:
        report: The comparison; rows without divergence (full precision, failures) are left out.
        path: Where to; the suffix says which kind of file.

    Raises:
        ConfigError: matplotlib is missing, there is nothing to draw, or the file cannot be
            written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    families = _families(report)
    if not families:
        raise ConfigError("plot: no row has a divergence above 0; nothing to draw")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for family, rows in families.items():
        points = [(row.value("bits_per_value"), row.value("kl")) for row in rows]
        yardstick = family == YARDSTICK
        axes.plot(
            *zip(*points, strict=True),
            marker="s" if yardstick else "o",
            linestyle="--" if yardstick else "-",
            color="0.4" if yardstick else None,
            label=f"{family} (yardstick)" if yardstick else family,
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits per value, all included")
    axes.set_ylabel("KL to full precision, nats per token")
    axes.set_title(title(report), fontsize="medium")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path} cannot be written ({error})") from error


def require_matplotlib() -> None:
    """Check that matplotlib can be imported.

    Raises:
        ConfigError: It cannot.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot: matplotlib is missing; run pip install 'kvcompress[plot]'")


def check_suffix(path: Path) -> None:
    """Check that matplotlib draws files of this suffix; one that has none becomes a PNG.

    Raises:
        ConfigError: It does not.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix and suffix not in known:
        raise ConfigError(f"plot: {path} must end in one of {', '.join(sorted(known))}")


def _families(report: Report) -> Mapping[str, list[Row]]:
    """Rows that can be drawn, by method, fewest bits first."""
    families: dict[str, list[Row]] = {}
    for row in report.rows:
        if (row.value("kl") or 0) > 0:
            words = (word for word in row.method.split(":") if "=" not in word)
            families.setdefault(":".join(words), []).append(row)
    for rows in families.values():
        rows.sort(key=lambda row: row.value("bits_per_value") or 0)
    return families
