from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.stages.rope import PostRope, PreRope, RopePolicy
from kvcompress.stages.transform import Chain, ChannelScale, Identity, RandomisedHadamard
from kvcompress.stages.windowed import WindowedRope
from tests.stages.rope_cases import DIM, HEADS, ROTATIONS, Plain, largest, normal, rotated

KINDS = sorted(ROTATIONS)
POLICIES: dict[str, RopePolicy] = {
    "post": PostRope(),
    "pre": PreRope(),
    "windowed": WindowedRope(),
}
EXACT = ["post", "pre"]
TRANSFORMS = {
    "identity": Identity(DIM),
    "chain": Chain(
        (
            ChannelScale(np.geomspace(0.5, 2, HEADS * DIM).reshape(HEADS, DIM)),
            RandomisedHadamard(DIM),
        )
    ),
}


@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(KINDS),
    st.booleans(),
    st.integers(0, 131_072),
    st.integers(1, 9),
)
def test_from_code_undoes_to_code(
    policy: str, kind: str, centred: bool, start: int, count: int
) -> None:
    rope, rotary = POLICIES[policy], ROTATIONS[kind]
    keys = normal(2, HEADS, count, DIM)
    mean = normal(2, HEADS, 1, DIM, seed=1) if centred else None
    for positions in (range(start, start + count), list(range(start + count, start, -1))):
        coded = rope.to_code(keys, mean, rotary, positions)
        assert coded.shape == keys.shape
        assert largest(rope.from_code(coded, mean, rotary, positions) - keys) < 5e-6


@given(st.sampled_from(["pre", "windowed"]), st.sampled_from(KINDS), st.integers(0, 100_000))
def test_unrotated_codes_know_no_position(policy: str, kind: str, start: int) -> None:
    rotary = ROTATIONS[kind]
    plain, mean = normal(1, HEADS, 6, DIM), normal(1, HEADS, 1, DIM, seed=1)
    places = range(start, start + 6)
    coded = POLICIES[policy].to_code(rotated(plain, rotary, places), mean, rotary, places)
    np.testing.assert_allclose(coded, plain - mean, atol=5e-6)


def test_post_rope_keys_are_coded_as_they_come() -> None:
    keys = normal(1, HEADS, 6, DIM)
    assert PostRope().to_code(keys, None, ROTATIONS["plain"], range(6)) is keys
    mean = normal(1, HEADS, 1, DIM, seed=1)
    rotary = ROTATIONS["plain"]
    assert rotary is not None
    # A constant before RoPE is what is taken out: keys that are nothing else code to zero.
    constant = rotary.rotate(mx.broadcast_to(mean, keys.shape), range(6))
    assert largest(PostRope().to_code(constant, mean, rotary, range(6))) < 1e-6


@given(
    st.sampled_from(EXACT),
    st.sampled_from(KINDS),
    st.sampled_from(sorted(TRANSFORMS)),
    st.booleans(),
    st.integers(0, 2000),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_scores_are_those_of_the_decoded_keys(
    policy: str, kind: str, through: str, centred: bool, start: int, group: int, length: int
) -> None:
    rope, rotary, transform, coder = POLICIES[policy], ROTATIONS[kind], TRANSFORMS[through], Plain()
    mean = normal(1, HEADS, 1, DIM, seed=1) if centred else None
    positions = range(start, start + 11)
    places = range(start + 11, start + 11 + length)
    keys = rotated(normal(1, HEADS, 11, DIM), rotary, positions)
    raw = rotated(normal(1, HEADS, group * length, DIM, seed=2), rotary, places)

    fields = coder.encode(transform.forward(rope.to_code(keys, mean, rotary, positions)))
    queries = rope.queries(raw, transform, rotary, places)
    assert queries.raw is raw
    assert queries.positions == places
    scores = rope.scores(
        queries, fields, mean, positions, coder=coder, transform=transform, rotary=rotary
    )
    assert scores.shape == (1, HEADS, group * length, 11)
    decoded = rope.from_code(transform.inverse(coder.decode(fields)), mean, rotary, positions)
    assert largest(decoded - keys) < 2e-5
    assert largest(scores - raw @ keys.swapaxes(-1, -2)) < 5e-3


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kind", KINDS)
def test_scores_depend_on_distance_alone(policy: str, kind: str) -> None:
    rope, rotary, coder = POLICIES[policy], ROTATIONS[kind], Plain()
    mean = normal(1, HEADS, 1, DIM, seed=1)
    plain_keys, plain_q = normal(1, HEADS, 20, DIM), normal(1, HEADS, 3, DIM, seed=2)
    got = []
    for shift in (0, 5000):
        positions, places = range(shift, shift + 20), range(shift + 90, shift + 93)
        keys = rotated(plain_keys, rotary, positions)
        fields = coder.encode(rope.to_code(keys, mean, rotary, positions))
        queries = rope.queries(rotated(plain_q, rotary, places), Identity(DIM), rotary, places)
        got.append(
            rope.scores(
                queries,
                fields,
                mean,
                positions,
                coder=coder,
                transform=Identity(DIM),
                rotary=rotary,
            )
        )
    assert largest(got[0] - got[1]) < 1e-2


def test_queries_meet_the_mean_of_whatever_they_are_asked_of() -> None:
    rope, rotary, coder = PostRope(), ROTATIONS["plain"], Plain()
    positions, places = range(20), range(20, 21)
    keys = rotated(normal(1, HEADS, 20, DIM), rotary, positions)
    raw = rotated(normal(1, HEADS, 2, DIM, seed=2), rotary, places)
    queries = rope.queries(raw, Identity(DIM), rotary, places)
    for seed in (1, 7, 1):
        mean = normal(1, HEADS, 1, DIM, seed=seed)
        fields = coder.encode(rope.to_code(keys, mean, rotary, positions))
        scores = rope.scores(
            queries, fields, mean, positions, coder=coder, transform=Identity(DIM), rotary=rotary
        )
        assert largest(scores - raw @ keys.swapaxes(-1, -2)) < 1e-3
