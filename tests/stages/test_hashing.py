from __future__ import annotations

import hashlib

import numpy as np

from kvcompress.stages.hashing import hashed, noise, signs


def oracle(count: int, text: str) -> list[int]:
    """SplitMix64 in Python's own integers."""
    low = 2**64 - 1
    state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & low
        x = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & low
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & low
        out.append(x ^ (x >> 31))
    return out


def test_the_stream_never_changes() -> None:
    # Saved codes are readable only as long as these stay what they are.
    assert hashed(2, "test", 1).tolist() == [0x8585FBD631F87EA4, 0x09B47FDA168AA6F2]
    assert hashed(1000, "test", 1).tolist() == oracle(1000, "test:1")
    expected = [-1.0 if x >> 63 else 1.0 for x in oracle(50, "a:2:b")]
    assert signs(50, "a", 2, "b").tolist() == expected


def test_keys_give_independent_streams() -> None:
    a, b = signs(4096, "x", 1, 2), signs(4096, "x", 12)
    assert abs(float(np.mean(a * b))) < 0.06
    assert abs(float(np.mean(a))) < 0.06


def test_a_shorter_stream_is_a_prefix() -> None:
    np.testing.assert_array_equal(hashed(100, 5)[:7], hashed(7, 5))


def test_noise_has_mean_zero_and_variance_one() -> None:
    x = noise((200, 50), "n", 3)
    assert x.shape == (200, 50)
    assert x.dtype == np.float32
    assert abs(float(x.mean())) < 0.05
    assert abs(float(x.var()) - 1) < 0.05
    np.testing.assert_array_equal(x.reshape(-1)[:7], noise((7,), "n", 3))
    scaled = oracle(7, "n:3")
    expected = [((v >> 40) / 2**24 - 0.5) * 12**0.5 for v in scaled]
    np.testing.assert_allclose(x.reshape(-1)[:7], expected, rtol=1e-6)
