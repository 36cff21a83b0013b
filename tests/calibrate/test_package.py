from __future__ import annotations

import subprocess
import sys

import pytest

import kvcompress.calibrate
from kvcompress import calibrate as package_or_function
from kvcompress.calibrate import __all__ as names
from tests.calibrate.fakes import PROSE, ByteTokenizer, tiny_llama

QUICK = """
import sys
import kvcompress.calibrate
assert not {"mlx", "mlx_lm", "numpy"} & set(sys.modules), sorted(sys.modules)
from kvcompress.calibrate import calibration_of, load_calibration
assert "mlx_lm" not in sys.modules
"""


def test_every_public_name_is_there() -> None:
    for name in names:
        assert getattr(kvcompress.calibrate, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvcompress.calibrate.nothing  # noqa: B018


def test_the_package_is_the_function_too() -> None:
    made = package_or_function(tiny_llama(), ByteTokenizer(), PROSE, tokens=100)
    assert len(made.layers) == 2


def test_importing_it_imports_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", QUICK], check=True)
