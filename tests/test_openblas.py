from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvcompress.openblas import LIBRARY

PRODUCT = """
import json, sys
import numpy as np
from kvcompress.openblas import prefer_openblas
untouched = "mlx.core" not in sys.modules
if {late}:
    import mlx.core
loaded, again = prefer_openblas(), prefer_openblas()
import mlx.core as mx
a = np.random.default_rng(0).standard_normal((96, 64), dtype=np.float32)
b = np.random.default_rng(1).standard_normal((64, 80), dtype=np.float32)
error = np.abs(np.array(mx.array(a) @ mx.array(b)) - a.astype(np.float64) @ b).max()
print(json.dumps(dict(untouched=untouched, loaded=loaded, again=again, error=float(error))))
"""
BARE = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=BARE)


@pytest.mark.parametrize("late", [False, True])
def test_tells_whether_it_is_in_front_and_products_stay_right(late: bool) -> None:
    loadable = run(f"import ctypes; ctypes.CDLL({LIBRARY!r})").returncode == 0
    done = run(PRODUCT.format(late=late))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["untouched"]
    assert result["error"] < 1e-4
    assert result["loaded"] is (sys.platform == "linux" and loadable and not late)
    assert result["again"] is result["loaded"]
