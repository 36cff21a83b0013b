"""Put OpenBLAS in front of the reference BLAS that MLX's CPU wheel for Linux carries.

That BLAS is portable and slow: a float32 matrix product runs ten to thirty times faster through
OpenBLAS. MLX looks ``cblas_sgemm`` and its kin up in the process's global scope before its own
folder, so a library opened there first takes over. Only float32 and float64 gain: float16 and
bfloat16 products are MLX's own code. This module imports neither MLX nor NumPy.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import Final

LIBRARY: Final = "libopenblas.so.0"

_logger = logging.getLogger(__name__)


def prefer_openblas() -> bool:
    """Load OpenBLAS ahead of MLX, where that helps and is possible.

    Call it before the first import of MLX; afterwards the slow library is already bound. Calling
    it again is harmless.

    Returns:
        Whether OpenBLAS answers MLX's calls: loaded now, by an earlier call, or by ``LD_PRELOAD``.
        False on other systems than Linux (macOS has Accelerate), where no OpenBLAS is
        installed, and where MLX came first.
    """
    if sys.platform != "linux":
        return False
    if openblas_answers():
        return True
    if "mlx.core" in sys.modules:
        _logger.debug("mlx is already imported; its own BLAS stays in use")
        return False
    try:
        ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        _logger.debug("no OpenBLAS to load: %s", error)
        return False
    return openblas_answers()


def openblas_answers() -> bool:
    """Whether a symbol that only OpenBLAS has can be found without naming a library."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "openblas_get_config")
