"""A configuration with every kind of scalar option."""

from __future__ import annotations

from attrs import frozen

from kvcompress.config import boolean, choice, fraction, integer, number, pair, text


@frozen(kw_only=True)
class Toy:
    bits: int = integer(4, low=1, high=8, help="Bits.")
    dim: int = integer(8, choices=(2, 4, 8, 16), help="Dimension.")
    window: int = integer(128, help="Window.")
    limit: int | None = integer(None, low=0, optional=True, help="Limit.")
    scale: float = number(1.0, low=0.5, help="Scale.")
    beta: float = fraction(0.5, "Blend.")
    rope: str = choice("banded", ("banded", "exact"), "Rotation.")
    whiten: bool = boolean(True, "Whiten.")
    label: str = text("", "Label.")
    skip: tuple[int, int] = pair(0, low=0, help="Layers.")
