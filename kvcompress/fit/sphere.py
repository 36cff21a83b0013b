"""The law of one coordinate of a uniformly random vector on a sphere, in closed form.

A vector of ``dim`` channels that was randomly rotated and divided by its root mean square lies
on the sphere of radius ``sqrt(dim)``. A coordinate ``x`` of it has variance 1 and the density
``f(x) ~ (1 - x^2/dim)^((dim-3)/2)`` on ``|x| <= sqrt(dim)``; TurboQuant (arXiv 2504.19874,
lemma 1) works with the same law for vectors of norm 1. Substituting ``x = sqrt(dim) sin(a)``
turns its integrals into those of powers of the cosine, which have a finite closed form.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen

from kvcompress.errors import ConfigError

Float64 = np.ndarray


@frozen
class SphereMarginal:
    """Density and partial moments of a coordinate, for ``dim >= 2`` channels.

    Attributes:
        dim: Channels of the vector.
        radius: ``sqrt(dim)``, the end of the support.
    """

    dim: int
    radius: float = field(init=False)
    _norm: float = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.dim < 2:
            raise ConfigError(f"SphereMarginal: dim must be at least 2 (got {self.dim})")
        object.__setattr__(self, "radius", float(np.sqrt(self.dim)))
        half = _cosine_power_integral(np.array([np.pi / 2]), self.dim - 2)
        object.__setattr__(self, "_norm", 2.0 * float(half[0]))

    def density(self, x: Float64) -> Float64:
        """``f(x)``; unbounded at the ends of the support for two channels."""
        inside = np.maximum(1.0 - (x / self.radius) ** 2, 0.0)
        with np.errstate(divide="ignore"):
            power = np.power(inside, (self.dim - 3) / 2)
        return np.asarray(power / (self._norm * self.radius))

    def mass(self, x: Float64) -> Float64:
        """Probability between 0 and ``x``; odd in ``x``."""
        return _cosine_power_integral(self._angle(x), self.dim - 2) / self._norm

    def moment(self, x: Float64) -> Float64:
        """``E[t; 0 < t < x]``, even in ``x``."""
        end = np.cos(self._angle(x)) ** (self.dim - 1)
        return np.asarray(self.radius * (1.0 - end) / ((self.dim - 1) * self._norm))

    def _angle(self, x: Float64) -> Float64:
        return np.arcsin(np.clip(np.asarray(x, dtype=np.float64) / self.radius, -1.0, 1.0))


def _cosine_power_integral(angle: Float64, power: int) -> Float64:
    """The integral of ``cos^power`` from 0 to ``angle``, by parts: all terms have one sign."""
    odd = power % 2
    sine, cosine = np.sin(angle), np.cos(angle)
    total = sine if odd else angle
    edge = sine * cosine ** (1 + odd)  # sin cos^(n-1) of the next term
    for n in range(2 + odd, power + 1, 2):
        total = (edge + (n - 1) * total) / n
        edge = edge * cosine**2
    return np.asarray(total, dtype=np.float64)
