from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.errors import ConfigError
from kvcompress.stages.gain_coder import GainCoder
from kvcompress.stages.levels import LloydMaxLevels
from kvcompress.stages.tree_coder import TreeCoder
from tests.stages.test_gain_coder import unit_rows

# Levels of the Gaussian: 2 + 1 bits 0.0348, 2 + 2 0.0097; a few per cent less at 128 channels.
ERROR = {2: 0.1160, 3: 0.0342, 4: 0.00953}


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dim", [64, 80])
def test_the_first_plane_is_the_coarser_code_bit_for_bit(bits: int, dim: int) -> None:
    coder = TreeCoder(dim, 2, bits, form="raw")
    assert coder.high_bits + coder.low_bits == bits
    alone = GainCoder(LloydMaxLevels(dim, coder.high_bits), 2, form="raw")
    z = mx.random.normal((1, 2, 200, dim), key=mx.random.key(bits))
    fields, expected = coder.encode(z), alone.encode(z)
    assert mx.array_equal(fields["high"], expected["codes"])
    assert mx.array_equal(fields["gain"], expected["gain"])
    upper = {name: fields[name] for name in ("high", "gain")}
    assert mx.array_equal(coder.first_plane(upper), alone.decode(expected))


@pytest.mark.parametrize("bits", ERROR)
def test_distortion(bits: int) -> None:
    x = mx.array(unit_rows(128))
    coder = TreeCoder(128, 1, bits, form="raw")
    error = mx.square(coder.decode(coder.encode(x)) - x).sum(-1).mean().item()
    assert error == pytest.approx(ERROR[bits], rel=0.03)


def test_a_matched_gain_fits_the_whole_code() -> None:
    x = mx.array(unit_rows(64))
    coder = TreeCoder(64, 1, 4, form="matched")
    norms = np.linalg.norm(np.array(coder.decode(coder.encode(x))), axis=-1)
    np.testing.assert_allclose(norms, 1, rtol=2**-8)


def test_bytes() -> None:
    coder = TreeCoder(128, 4, 5)
    assert [f.payload_bits for f in coder.fields] == [3 * 128, 2 * 128, 0]
    assert sum(f.bytes_per_token for f in coder.fields) == 4 * (128 * 5 // 8 + 2)


def test_illegal_options_are_refused() -> None:
    for bits in (1, 9):
        with pytest.raises(
            ConfigError, match=rf"TreeCoder: bits must be from 2 to 8 \(got {bits}\)"
        ):
            TreeCoder(64, 1, bits)
    with pytest.raises(ConfigError, match="TreeCoder: form must be"):
        TreeCoder(64, 1, 4, form="best")  # type: ignore[arg-type]
