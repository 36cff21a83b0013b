from __future__ import annotations

import warnings

import pytest

from kvcompress.cli.told import told


def test_each_step_has_a_bar_and_each_warning_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with told() as progress:
        for done in range(3):
            progress("recording", done, 2)
            warnings.warn("few tokens", stacklevel=1)
        progress("fitting", 5, 5)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("recording") == 1
    assert "2/2" in err
    assert "5/5" in err
    assert err.count("warning: few tokens\n") == 1


def test_without_a_step_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with told():
        pass
    assert capsys.readouterr() == ("", "")


def test_bars_end_where_a_step_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def fit() -> None:
        with told() as progress:
            progress("fitting", 1, 2)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit()
    assert "1/2" in capsys.readouterr().err
