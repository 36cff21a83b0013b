from __future__ import annotations

import numpy as np
import pytest

from kvcompress.errors import ConfigError
from kvcompress.fit.sphere import SphereMarginal


@pytest.mark.parametrize("dim", [3, 4, 5, 17, 64, 577])
def test_moments_are_the_integrals_of_the_density(dim: int) -> None:
    law = SphereMarginal(dim)
    ends = np.linspace(0, law.radius, 7)[1:]
    for end in ends:
        grid = np.linspace(0, end, 200_001)
        middle = (grid[1:] + grid[:-1]) / 2
        share = law.density(middle) * np.diff(grid)
        assert law.mass(end) == pytest.approx(share.sum(), rel=1e-5, abs=1e-9)
        assert law.moment(end) == pytest.approx((share * middle).sum(), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("dim", [2, 3, 64, 128, 1024])
def test_half_of_the_mass_lies_on_each_side(dim: int) -> None:
    law = SphereMarginal(dim)
    assert law.mass(law.radius) == pytest.approx(0.5, rel=1e-12)
    assert law.mass(-law.radius) == pytest.approx(-0.5, rel=1e-12)
    assert law.moment(-1.0) == law.moment(1.0)


def test_one_channel_is_refused() -> None:
    with pytest.raises(ConfigError, match="dim must be at least 2"):
        SphereMarginal(1)
