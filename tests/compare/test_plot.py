from __future__ import annotations

import importlib.util
from pathlib import Path

import attrs
import pytest

from kvcompress.compare.plot import save_plot
from kvcompress.errors import ConfigError
from tests.compare.sample import sample_report


def test_the_picture_has_a_line_a_method_and_no_full_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, tuple[list[float], list[float]]] = {}
    plot = Axes.plot

    def watched(self, x, y, **kwargs):
        drawn[kwargs["label"]] = (list(x), list(y))
        return plot(self, x, y, **kwargs)

    monkeypatch.setattr(Axes, "plot", watched)
    save_plot(sample_report(), tmp_path / "plot.png")
    assert drawn == {
        "affine (yardstick)": ([5.0, 6.5], [0.26, 0.006]),
        "toys:turboquant": ([4.0], [0.04]),
    }
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = sample_report()
    with pytest.raises(ConfigError, match="nothing to draw"):
        save_plot(attrs.evolve(report, rows=report.rows[:1]), tmp_path / "plot.png")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_plot(report, tmp_path / "plot.nonsense")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvcompress\[plot\]'"):
        save_plot(report, tmp_path / "plot.png")
