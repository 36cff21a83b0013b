from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.stages.base import Transform
from kvcompress.stages.transform import (
    HADAMARD_SIZES,
    Chain,
    ChannelScale,
    Identity,
    RandomisedHadamard,
)

MAKE: dict[str, Callable[[int], Transform]] = {
    "identity": Identity,
    "rotation": lambda dim: RandomisedHadamard(dim, seed=3),
    "scale": lambda dim: ChannelScale(np.geomspace(0.1, 10, 2 * dim).reshape(2, dim)),
    "chain": lambda dim: Chain(
        (ChannelScale(np.geomspace(0.5, 2, 2 * dim).reshape(2, dim)), RandomisedHadamard(dim))
    ),
}
DIMS = (1, 2, 3, 8, 36, 48, 60, 64, 72, 80, 96, 112, 120, 128, 144, 160, 192, 256)


def rows(dim: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, 2, 5, dim), key=mx.random.key(seed))


@given(st.sampled_from(sorted(MAKE)), st.sampled_from(DIMS), st.integers(0, 1000))
def test_the_law_of_transforms(kind: str, dim: int, seed: int) -> None:
    stage = MAKE[kind](dim)
    assert isinstance(stage, Transform)
    assert stage.dim == dim
    x, q = rows(dim, seed), rows(dim, seed + 1)
    z = stage.forward(x)
    assert z.shape == x.shape
    assert z.dtype == mx.float32
    np.testing.assert_allclose(stage.inverse(z), x, atol=2e-5)
    scores = (stage.query(q) @ z.swapaxes(-1, -2), q @ x.swapaxes(-1, -2))
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-4 * dim**0.5)


@pytest.mark.parametrize("dim", sorted({*HADAMARD_SIZES, *DIMS, 31, 320, 448, 576, 640, 1100}))
def test_rotations_are_orthonormal(dim: int) -> None:
    stage = RandomisedHadamard(dim, seed=dim)
    matrix = np.array(stage.forward(mx.eye(dim)[None, None]), dtype=np.float64)[0, 0]
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=3e-6)
    back = np.array(stage.inverse(mx.eye(dim)[None, None]), dtype=np.float64)[0, 0]
    np.testing.assert_allclose(back, matrix.T, atol=1e-6)


def test_sizes_that_mlx_cannot_do_leave_the_process_alive() -> None:
    # At these sizes mx.hadamard_transform aborts, corrupts memory or is wrong.
    script = (
        "import mlx.core as mx\n"
        "from kvcompress.stages.transform import RandomisedHadamard as R\n"
        "for d in (12, 20, 28, 36, 40, 60, 72, 100, 120, 140, 144, 168, 240, 288, 336, 576):\n"
        "    x = mx.random.normal((1, 1, 16, d))\n"
        "    r = R(d)\n"
        "    assert mx.abs(r.inverse(r.forward(x)) - x).max().item() < 1e-4, d\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("dim", [60, 64, 72, 80, 96, 112, 120, 128, 160, 576])
def test_a_rotation_spreads_one_channel_as_a_gaussian(dim: int) -> None:
    kurtosis = []
    for seed in range(20):
        z = np.array(RandomisedHadamard(dim, seed).forward(mx.eye(dim)[None, None]))[0, 0]
        kurtosis.append((z**4).mean(-1) * dim**2)
    # Three for a Gaussian; one pass of signs and Hadamard would give exactly 1, and windows that
    # share their signs undo each other: up to 40.
    of_channel = np.mean(kurtosis, axis=0)
    assert of_channel.min() > 2.3
    assert of_channel.max() < 3.7


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_what_a_token_becomes_does_not_depend_on_others(dim: int) -> None:
    # A matrix product would fail: BLAS adds in another order for another number of rows.
    stage, x = RandomisedHadamard(dim), mx.random.normal((1, 2, 160, dim), key=mx.random.key(1))
    whole = stage.forward(x)
    for start, stop in ((0, 1), (3, 20), (159, 160), (0, 159)):
        assert mx.array_equal(stage.forward(x[:, :, start:stop]), whole[:, :, start:stop])
    strided = mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)
    assert mx.array_equal(stage.forward(strided), whole)


def test_seeds_differ_and_tables_are_shared() -> None:
    x = rows(64)
    a, b, c = RandomisedHadamard(64, 1), RandomisedHadamard(64, 1), RandomisedHadamard(64, 2)
    assert a == b
    assert a != c
    assert a._turns is b._turns
    assert not np.allclose(a.forward(x), c.forward(x))
    assert a.table_bytes == 2 * 64 * 4
    assert RandomisedHadamard(72).table_bytes == 4 * 72 * 4


@pytest.mark.parametrize("kind", sorted(MAKE))
def test_stages_can_be_copied(kind: str) -> None:
    stage = MAKE[kind](64)
    x = rows(64)
    assert mx.array_equal(copy.deepcopy(stage).forward(x), stage.forward(x))


def test_a_scale_is_kept_for_each_head() -> None:
    scale = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    stage = ChannelScale(scale)
    np.testing.assert_allclose(
        stage.forward(mx.ones((1, 2, 3, 4))), np.broadcast_to(1 / scale[:, None], (1, 2, 3, 4))
    )
    assert stage.table_bytes == 32


def test_equal_scales_are_one_table() -> None:
    scale = np.geomspace(0.1, 10, 128).reshape(2, 64)
    assert ChannelScale(scale).scale is ChannelScale(scale.copy()).scale


@pytest.mark.parametrize("scale", [np.ones(4), np.zeros((2, 4)), np.full((2, 4), np.inf)])
def test_scales_that_cannot_be_undone_are_refused(scale: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="ChannelScale: scale must be"):
        ChannelScale(scale)


def test_chains_must_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"Chain: .* equal dim \(got \[64, 128\]\)"):
        Chain((Identity(64), Identity(128)))
    with pytest.raises(ConfigError, match="Chain: stages"):
        Chain(())
    for make in (Identity, RandomisedHadamard):
        with pytest.raises(ConfigError, match="dim must be positive"):
            make(0)
