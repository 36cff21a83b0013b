from __future__ import annotations

import pytest

from kvcompress.compare.progress import Progress
from kvcompress.compare.report import Row


def test_each_row_leaves_a_line_with_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.begin(["a:b=1", "c", "d"])
    for row in (
        Row("a:b=1", measures={"kl": 0.01234}),
        Row("c", error="ConfigError: c: no"),
        Row("d"),
    ):
        progress.row_starts(row.method)
        progress.row_ends(row)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "1/3 a:b=1: 0 s, KL 0.0123",
        "2/3 c: ConfigError: c: no",
        "3/3 d: 0 s",
    ]
