from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kvcompress.compare.score_plot import by_age, save_score_plot
from kvcompress.errors import ConfigError
from tests.compare.sample import sample_scores


def test_a_line_a_method_in_a_panel_a_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[str, list[float], list[float]]] = []
    plot = Axes.plot

    def watched(self, x, y, **kwargs):
        drawn.append((kwargs["label"], list(x), list(y)))
        return plot(self, x, y, **kwargs)

    monkeypatch.setattr(Axes, "plot", watched)
    save_score_plot(sample_scores(), tmp_path / "ages.png")
    assert drawn == [
        ("a2ats:rope=exact", [16, 32], [0.5, 2.0]),
        ("a2ats:rope=single", [16, 32], [4.0625, 16.25]),
        ("a2ats:rope=exact", [16, 32], [0.5, 2.0]),
    ]
    assert (tmp_path / "ages.png").read_bytes().startswith(b"\x89PNG")


def test_where_every_row_failed_nothing_is_drawn(tmp_path: Path) -> None:
    report = sample_scores()
    failed = attrs.evolve(report, rows=report.failed)
    with pytest.raises(ConfigError, match="every row failed"):
        save_score_plot(failed, tmp_path / "ages.png")


def test_ages_are_numbers_in_the_order_of_the_run() -> None:
    assert by_age({"all": 1.0, "age 16": 0.0, "age 32": 0.5, "age 128": 0.25}) == {
        32: 0.5,
        128: 0.25,
    }
