"""Tables that are kept once, however many layers, conversations and binds use them."""

from __future__ import annotations

import hashlib
import threading
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

_tables: WeakValueDictionary[str, mx.array] = WeakValueDictionary()
_lock = threading.Lock()


def shared_table(values: np.ndarray) -> mx.array:
    """The MLX array of these contents: evaluated, and the same object while anybody holds it.

    Args:
        values: Any shape; float64 becomes float32, which MLX computes in.
    """
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    contents = np.ascontiguousarray(values)
    key = hashlib.sha256(f"{values.dtype.str} {values.shape}".encode() + contents.tobytes())
    with _lock:
        table = _tables.get(key.hexdigest())
        if table is None:
            table = mx.array(contents)
            mx.eval(table)  # a lazy table could not be evaluated by another thread
            _tables[key.hexdigest()] = table
        return table
