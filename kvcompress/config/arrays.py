"""Options that are arrays: a codebook, a matrix."""

# ruff: noqa: A002 (`help` is what every option parser calls it)

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from kvcompress.config.option import Option, option_field
from kvcompress.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from hypothesis.strategies import SearchStrategy
    from numpy.typing import NDArray


def array(
    help: str, *, words: Sequence[str] = (), optional: bool = True, default: Any = None
) -> Any:
    """Declare an array of finite real numbers, kept as a read-only float32 NumPy array.

    NumPy and MLX arrays and nested lists are taken; a command line names a ``.npy`` file. Which
    shapes are legal usually depends on other options, so the method's ``check`` decides it.
    Where ``words`` are given, each is legal in an array's place.
    """
    return option_field(_Array(default=default, optional=optional, help=help, words=tuple(words)))


def digest(values: NDArray[np.float32]) -> str:
    """Return the SHA-256 of an array's shape and contents, in hexadecimal."""
    contents = values.astype("<f4").tobytes()
    return hashlib.sha256(f"{values.shape}".encode() + contents).hexdigest()


@frozen(kw_only=True)
class _Array(Option):
    words: tuple[str, ...] = ()

    def _kind(self) -> str:
        named = "".join(f"{word!r} or " for word in self.words)
        return f"{named}an array of finite numbers (a .npy file on a command line)"

    def _accept(self, value: Any) -> NDArray[np.float32] | str:
        import numpy as np

        if isinstance(value, str):
            if value not in self.words:
                raise ValueError("not one of the words")
            return str(value)

        # NumPy has no bfloat16, so MLX converts its own arrays first.
        if type(value).__module__.startswith("mlx."):
            import mlx.core as mx

            value = value.astype(mx.float32)
        raw = np.asarray(value)
        if raw.dtype.kind not in "iuf" or raw.size == 0 or raw.ndim == 0:
            raise TypeError("not an array of real numbers")
        with np.errstate(over="ignore"):
            kept = np.array(raw, dtype=np.float32, order="C")
        if not np.isfinite(kept).all():
            raise ValueError("not finite in float32")
        kept.setflags(write=False)
        return kept

    def _read(self, text: str) -> Any:
        import numpy as np

        if text in self.words:
            return text
        return np.load(text, allow_pickle=False)

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        return {"sha256": digest(value), "shape": list(value.shape)}

    def decode(self, data: Any, *, owner: str = "") -> Any:
        if isinstance(data, dict):
            raise ConfigError(
                f"{owner}: {self.name} is stored by its digest only; give the array itself as well"
            )
        return self.check(data, owner=owner)

    @property
    def comparison_key(self) -> Callable[[Any], Any]:
        return lambda value: value if value is None or isinstance(value, str) else digest(value)

    def _draw(self) -> SearchStrategy[Any]:
        from hypothesis import strategies as st
        from hypothesis.extra import numpy as npst

        shapes = npst.array_shapes(min_dims=1, max_dims=3, max_side=4)
        arrays = npst.arrays("float32", shapes, elements=st.floats(-8, 8, width=32))
        return st.sampled_from(self.words) | arrays if self.words else arrays
