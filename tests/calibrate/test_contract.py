from __future__ import annotations

from typing import ClassVar

import pytest

from kvcompress.calibrate.contract import (
    Calibrated,
    FitKey,
    calibrate_command,
    calibration_of,
    fit_key,
)
from kvcompress.errors import BrokenPlugin, CalibrationRequired
from tests.calibrate.fakes import Peak, Plain, calibration


def test_the_key_holds_the_options_that_tables_depend_on() -> None:
    assert fit_key(Peak(bits=3, window=5)) == FitKey("peak", '{"bits": 3}')
    assert fit_key(Plain()) == FitKey("plain", "{}")
    assert fit_key(Peak()).values == {"bits": 8}


def test_fit_options_must_be_options() -> None:
    class Odd(Peak):
        fit_options: ClassVar[tuple[str, ...]] = ("bits", "wits")

    with pytest.raises(BrokenPlugin, match="peak: fit_options names 'wits', which is no option"):
        fit_key(Odd())


def test_the_command_names_what_is_not_the_default() -> None:
    assert "--method peak:bits=3 " in calibrate_command(Peak(bits=3))
    assert "--method peak " in calibrate_command(Peak())


def test_the_command_can_be_read_back() -> None:
    class Edged(Peak):
        fit_options: ClassVar[tuple[str, ...]] = ("bits", "skip_layers")

    assert "--method peak:bits=2:skip_layers=1+3 " in calibrate_command(
        Edged(bits=2, skip_layers=(1, 3))
    )


def test_a_method_without_its_calibration_says_how_to_make_one() -> None:
    with pytest.raises(CalibrationRequired, match="peak: needs a calibration") as caught:
        calibration_of(Peak(bits=2))
    assert "kvcompress calibrate --method peak:bits=2 --model MODEL --out" in str(caught.value)
    made = calibration()
    assert calibration_of(Peak(calibration=made)) is made


def test_the_protocol_is_what_a_calibrating_method_has() -> None:
    assert isinstance(Peak(), Calibrated)
    assert not isinstance(Plain(), Calibrated)
