from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.layers import Rotary
from kvcompress.stages import windowed
from kvcompress.stages.base import BandCoder, Fields
from kvcompress.stages.transform import ChannelScale, Identity
from kvcompress.stages.windowed import WindowedRope
from tests.stages.rope_cases import DIM, HEADS, ROTATIONS, Plain, largest, normal, rotated

KINDS = sorted(ROTATIONS)
TURNING = [kind for kind in KINDS if kind != "none"]


class OfBands(Plain):
    """Scores the tokens of all bands at once, by definition."""

    def band_scores(self, q: mx.array, fields: Fields, band: mx.array) -> mx.array:
        own = mx.take(q, band, axis=2)  # (B, H, T, M, D)
        return (own @ fields["z"][..., None]).squeeze(-1).swapaxes(2, 3)


def scored(
    rope: WindowedRope,
    rotary: Rotary | None,
    plain_keys: mx.array,
    plain_queries: mx.array,
    positions: range,
    places: range,
    mean: mx.array | None = None,
    coder: Plain | None = None,
) -> tuple[mx.array, mx.array]:
    """Windowed scores, and true ones."""
    coder, transform = (
        coder or Plain(),
        ChannelScale(np.geomspace(0.5, 2, HEADS * DIM).reshape(HEADS, DIM)),
    )
    keys = rotated(plain_keys, rotary, positions)
    raw = rotated(plain_queries, rotary, places)
    fields = coder.encode(transform.forward(rope.to_code(keys, mean, rotary, positions)))
    queries = rope.queries(raw, transform, rotary, places)
    got = rope.scores(
        queries, fields, mean, positions, coder=coder, transform=transform, rotary=rotary
    )
    return got, raw @ keys.swapaxes(-1, -2)


@given(
    st.integers(1, 300),
    st.sampled_from([1.0, 1.2, 1.5, 2.0, 3.7]),
    st.integers(0, 5000),
    st.integers(1, 5000),
)
def test_bands_cover_every_distance_once_and_stand_still(
    first: int, growth: float, low: int, width: int
) -> None:
    rope = WindowedRope(first, growth)
    bands = rope.bands(low, low + width)
    assert bands[0][0] <= low
    assert bands[-1][1] >= low + width
    assert bands[-1][0] < low + width
    assert bands[0][1] > low
    assert all(stop == start for (_, stop), (start, _) in pairwise(bands))
    assert all(stop > start for start, stop in bands)
    # Where a band begins depends on neither the tile nor the query.
    assert set(bands) <= set(rope.bands(0, low + width))


def test_bands_double() -> None:
    assert WindowedRope().bands(0, 1000) == (
        (0, 64),
        (64, 128),
        (128, 256),
        (256, 512),
        (512, 1024),
    )
    assert WindowedRope().bands(130, 256) == ((128, 256),)
    assert WindowedRope(constant=2048).bands(5, 99) == ((5, 99),)


@given(
    st.sampled_from(KINDS),
    st.booleans(),
    st.integers(0, 1000),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_bands_of_one_distance_are_exact(
    kind: str, centred: bool, start: int, gap: int, length: int, group: int
) -> None:
    positions = range(start, start + 12)
    places = range(start + 12 + gap, start + 12 + gap + length)
    mean = normal(1, HEADS, 1, DIM, seed=1) if centred else None
    got, true = scored(
        WindowedRope(first=1, growth=1.0),
        ROTATIONS[kind],
        normal(1, HEADS, 12, DIM),
        normal(1, HEADS, group * length, DIM, seed=2),
        positions,
        places,
        mean,
    )
    assert got.shape == (1, HEADS, group * length, 12)
    assert largest(got - true) < 5e-3


@pytest.mark.parametrize("kind", TURNING)
def test_a_score_is_the_mean_over_the_distances_of_its_band(kind: str) -> None:
    rotary = ROTATIONS[kind]
    assert rotary is not None
    key, query = normal(1, HEADS, 1, DIM), normal(1, HEADS, 1, DIM, seed=2)
    means = []
    for distance in range(64, 128):
        turned = rotary.rotate(query, range(distance, distance + 1))
        means.append(turned @ key.swapaxes(-1, -2))
    expected = mx.mean(mx.stack(means), axis=0)
    for distance in (64, 90, 127):
        got, _ = scored(
            WindowedRope(), rotary, key, query, range(7, 8), range(7 + distance, 8 + distance)
        )
        np.testing.assert_allclose(got, expected, atol=2e-4)


@pytest.mark.parametrize("kind", TURNING)
def test_the_mean_rotation_errs_least_of_all_constants(kind: str) -> None:
    rotary = ROTATIONS[kind]
    keys, query = normal(1, HEADS, 64, DIM), normal(1, HEADS, 1, DIM, seed=2)
    positions, place = range(64), range(127, 128)  # distances 64 to 127: one band

    def error(rope: WindowedRope) -> float:
        got, true = scored(rope, rotary, keys, query, positions, place)
        return float(mx.square(got - true).mean().item())

    banded = error(WindowedRope())
    # The same in expectation over keys: more than a fair share of the constants must lose.
    others = [error(WindowedRope(constant=b)) for b in (64, 80, 96, 112, 127)]
    assert banded < min(others) * 1.05
    assert banded < np.mean(others)


@pytest.mark.parametrize("kind", TURNING)
def test_a_constant_is_exact_at_its_distance_and_blind_to_others(kind: str) -> None:
    rotary, rope = ROTATIONS[kind], WindowedRope(constant=50)
    keys = mx.broadcast_to(normal(1, HEADS, 1, DIM), (1, HEADS, 40, DIM))
    query = normal(1, HEADS, 1, DIM, seed=2)
    got, true = scored(rope, rotary, keys, query, range(40), range(80, 81))
    np.testing.assert_allclose(got[..., 30], true[..., 30], atol=2e-4)  # 80 - 30 = 50
    np.testing.assert_allclose(got, mx.broadcast_to(got[..., 30:31], got.shape), atol=1e-5)


def test_error_falls_as_bands_are_added() -> None:
    rotary = Rotary(DIM, base=5e5)
    keys, query = normal(1, HEADS, 2000, DIM), normal(1, HEADS, 4, DIM, seed=2)
    errors = []
    for growth in (16.0, 4.0, 2.0, 1.25, 1.05):
        got, true = scored(
            WindowedRope(64, growth), rotary, keys, query, range(2000), range(2064, 2068)
        )
        errors.append(mx.square(got - true).mean().item())
    assert all(after < before for before, after in pairwise(errors)), errors


@given(
    st.sampled_from(KINDS),
    st.sampled_from([None, 100]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 199),
)
def test_neither_chunks_of_queries_nor_tiles_of_tokens_matter(
    kind: str, constant: int | None, length: int, group: int, cut: int
) -> None:
    rotary, rope = ROTATIONS[kind], WindowedRope(first=8, constant=constant)
    keys = normal(1, HEADS, 200, DIM)
    queries = normal(1, HEADS, group * length, DIM, seed=2)
    positions, places = range(10, 210), range(213, 213 + length)
    whole, _ = scored(rope, rotary, keys, queries, positions, places)

    tiles = [
        scored(rope, rotary, keys[:, :, part], queries, positions[part], places)[0]
        for part in (slice(0, cut), slice(cut, 200))
    ]
    assert largest(mx.concatenate(tiles, axis=-1) - whole) < 2e-4

    rows = queries.reshape(1, HEADS, group, length, DIM)
    for place in range(length):
        one, _ = scored(
            rope, rotary, keys, rows[:, :, :, place], positions, places[place : place + 1]
        )
        expected = whole.reshape(1, HEADS, group, length, 200)[:, :, :, place]
        assert largest(one - expected) < 2e-4


@given(
    st.sampled_from(KINDS),
    st.booleans(),
    st.integers(0, 60),
    st.integers(0, 300),
    st.integers(1, 3),
    st.integers(1, 300),
    st.integers(0, 200),
)
def test_all_bands_at_once_or_some_score_as_one_after_the_other(
    kind: str, centred: bool, start: int, gap: int, group: int, tokens: int, together: int
) -> None:
    positions = range(start, start + tokens)
    place = positions.stop + gap
    mean = normal(1, HEADS, 1, DIM, seed=1) if centred else None
    keys, queries = normal(1, HEADS, tokens, DIM), normal(1, HEADS, group, DIM, seed=2)
    case = WindowedRope(8), ROTATIONS[kind], keys, queries, positions, range(place, place + 1), mean
    assert isinstance(OfBands(), BandCoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windowed, "_NEAR", 0)
        patch.setattr(windowed, "_LAUNCHES", 0)
        one_by_one, _ = scored(*case)
        patch.setattr(windowed, "_LAUNCHES", together * HEADS * group * DIM)
        some_together, _ = scored(*case)
        at_once, _ = scored(*case, coder=OfBands())
        patch.setattr(windowed, "_NEAR", together)
        some_at_once, _ = scored(*case, coder=OfBands())
    assert largest(some_at_once - at_once) < 2e-4
    assert largest(one_by_one - at_once) < 2e-4
    assert largest(some_together - at_once) < 2e-4


def test_a_long_chunk_scores_as_its_queries_do_alone() -> None:
    rotary, length = ROTATIONS["partial"], 150  # more than are taken at a time, and a rest
    mean, keys = normal(1, HEADS, 1, DIM, seed=1), normal(1, HEADS, 200, DIM)
    queries = normal(1, HEADS, 2 * length, DIM, seed=2)
    places = range(205, 205 + length)
    rope = WindowedRope(first=8)
    whole, _ = scored(rope, rotary, keys, queries, range(200), places, mean)
    for place in (0, 63, 64, 127, 128, 149):
        one, _ = scored(
            rope, rotary, keys, queries[:, :, place::length], range(200),
            places[place : place + 1], mean,
        )  # fmt: skip
        assert largest(one - whole[:, :, place::length]) < 2e-4


def test_the_mean_counts_as_part_of_the_key() -> None:
    rotary, mean = ROTATIONS["plain"], normal(1, HEADS, 1, DIM, seed=1)
    keys, queries = normal(1, HEADS, 300, DIM), normal(1, HEADS, 2, DIM, seed=2)
    plain, _ = scored(WindowedRope(), rotary, keys, queries, range(300), range(364, 366))
    centred, _ = scored(WindowedRope(), rotary, keys, queries, range(300), range(364, 366), mean)
    assert largest(plain - centred) < 5e-4


def test_where_nothing_rotates_scores_are_exact() -> None:
    keys, queries = normal(1, HEADS, 300, DIM), normal(1, HEADS, 6, DIM, seed=2)
    for rope in (WindowedRope(), WindowedRope(constant=9)):
        got, true = scored(rope, None, keys, queries, range(300), range(364, 367))
        assert largest(got - true) < 1e-4


def test_queries_are_turned_back_once() -> None:
    rotary = ROTATIONS["plain"]
    plain = normal(1, HEADS, 6, DIM)
    raw = rotated(plain, rotary, range(70, 73))
    ready = WindowedRope().queries(raw, Identity(DIM), rotary, range(70, 73))
    assert ready.raw is raw
    np.testing.assert_allclose(ready.mapped, plain, atol=2e-6)


@pytest.mark.parametrize("count", [64, 65, 100, 129, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_after_a_query_do_not_matter_to_it(kind: str, count: int) -> None:
    rope, rotary = WindowedRope(16, 1.5), ROTATIONS[kind]
    positions, places = range(3, 203), range(203 - count, 203)
    plain_keys, plain_q = normal(1, HEADS, 200, DIM), normal(1, HEADS, count, DIM, seed=2)
    got, _ = scored(rope, rotary, plain_keys, plain_q, positions, places)
    assert got.shape == (1, HEADS, count, 200)
    assert mx.isfinite(got).all().item()
    for row in (0, count // 2, count - 1):
        place = places[row]
        seen = place - positions.start + 1
        own, _ = scored(
            rope,
            rotary,
            plain_keys[:, :, :seen],
            plain_q[:, :, row : row + 1],
            range(positions.start, place + 1),
            range(place, place + 1),
        )
        assert largest(got[:, :, row : row + 1, :seen] - own) < 1e-4
