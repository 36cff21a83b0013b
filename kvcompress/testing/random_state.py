"""The random states that belong to the user."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np


def random_states() -> dict[str, Any]:
    """What Python, NumPy and MLX would draw next, as values that compare."""
    numpys: Any = np.random.get_state()
    return {
        "random": random.getstate(),
        "numpy.random": tuple(x.tobytes() if isinstance(x, np.ndarray) else x for x in numpys),
        "mlx.core.random": tuple(np.array(a).tobytes() for a in _mlx_state()),
    }


def _mlx_state() -> Any:
    return mx.random.state


def stir() -> None:
    """Move every random state on, so that one which is seeded anew cannot be where it was."""
    random.random()
    np.random.random()
    mx.eval(mx.random.normal((1,)))
