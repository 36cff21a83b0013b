"""How a law is written: a test method that draws its own examples, and says what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

ALIKE = 0.5  # one bit a channel gives 0.8

UNHEEDED = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.filter_too_much,
)


class LawError(AssertionError):
    """What is under test does not keep a law."""


class Draw(Protocol):
    """Draws a value from a strategy; failing examples print what was drawn."""

    def __call__(self, strategy: SearchStrategy[T], label: Any = None) -> T:
        """Return a value of ``strategy``, printed under ``label``."""
        ...


def law(share: float = 1.0) -> Callable[[Callable[[Any, Draw], None]], Callable[[Any], None]]:
    """Turn a method ``(self, draw)`` into a test of the loaded Hypothesis profile.

    What is drawn may depend on ``self``, which ``@given`` on a method of a base class cannot do.

    Args:
        share: Part of the profile's examples to try, for laws whose examples cost more.
    """

    def mark(test: Callable[[Any, Draw], None]) -> Callable[[Any], None]:
        def run(self: Any) -> None:
            def example(data: st.DataObject) -> None:
                test(self, data.draw)

            example.__name__ = f"{type(self).__name__}_{test.__name__}"
            profile = settings()
            chosen = settings(
                max_examples=max(1, round(profile.max_examples * share * self.effort())),
                deadline=None,  # the first of a kind compiles, allocates, or shares the machine
                suppress_health_check=UNHEEDED,
            )
            chosen(given(st.data())(example))()

        run.__name__, run.__qualname__ = test.__name__, test.__qualname__
        run.__doc__, run.__module__ = test.__doc__, test.__module__
        return run

    return mark


def require(holds: object, text: str) -> None:
    """Break the law with ``text`` unless ``holds``.

    Raises:
        LawError: It does not hold.
    """
    if not holds:
        raise LawError(text)


def numbers(x: Any) -> np.ndarray:
    """An array of any dtype as float64."""
    if isinstance(x, mx.array):
        x = np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)
    return np.asarray(x, dtype=np.float64)


def require_equal(got: mx.array, wanted: mx.array, what: str) -> None:
    """Demand the same shape, dtype and bits.

    Raises:
        LawError: They differ.
    """
    require(
        got.shape == wanted.shape and got.dtype == wanted.dtype,
        f"{what}: got {got.dtype} {got.shape}, not {wanted.dtype} {wanted.shape}",
    )
    a, b = numbers(got), numbers(wanted)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    require(
        same.all(),
        f"{what}: {(~same).sum()} of {a.size} entries differ, first at "
        f"{tuple(int(i) for i in np.argwhere(~same)[0]) if not same.all() else ()}",
    )


def require_close(got: Any, wanted: Any, size: float, what: str) -> None:
    """Demand that no entry is further off than ``size``, and that all are finite.

    Raises:
        LawError: One is.
    """
    a, b = numbers(got), numbers(wanted)
    require(a.shape == b.shape, f"{what}: got shape {a.shape}, not {b.shape}")
    if not a.size:
        return
    require(np.isfinite(a).all(), f"{what}: not finite")
    off = float(np.abs(a - b).max())
    require(off <= size, f"{what}: off by {off:.3g}, where {size:.3g} is allowed")


def require_same_decoding(got: Any, wanted: Any, came: Any, what: str) -> None:
    """Demand that two decodings agree but for round-off.

    Sums in another order may put a value that lies between two levels to the other one, so a
    tenth of the coding error is allowed, in all; a real fault moves far more.

    Args:
        got: ``(B, H, T, D)``.
        wanted: What it should be.
        came: What was coded.
        what: Names the comparison.

    Raises:
        LawError: They do not agree.
    """
    a, b, x = numbers(got), numbers(wanted), numbers(came)
    require(a.shape == b.shape, f"{what}: got shape {a.shape}, not {b.shape}")
    require(np.isfinite(a).all(), f"{what}: not finite")
    allowed = 0.1 * np.linalg.norm(b - x) + 2e-3 * np.linalg.norm(x)
    off = float(np.linalg.norm(a - b))
    require(off <= allowed, f"{what}: off by {off:.3g} in all, where {allowed:.3g} is allowed")


def require_resemblance(got: Any, wanted: Any, what: str, least: float = ALIKE) -> None:
    """Demand that decoded rows ``(B, H, T, D)`` point where what came points.

    Args:
        got: What was decoded.
        wanted: What came.
        what: Names it in the error.
        least: Median cosine that is asked for.

    Raises:
        LawError: They do not, or are not finite.
    """
    a, b = numbers(got), numbers(wanted)
    require(a.shape == b.shape, f"{what}: got shape {a.shape}, not {b.shape}")
    require(np.isfinite(a).all(), f"{what}: not finite")
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine = float(np.median((a * b).sum(axis=-1) / np.maximum(norms, 1e-30)))
    require(cosine > least, f"{what}: a median cosine of {cosine:.3f} with what came")
