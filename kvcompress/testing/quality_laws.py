"""Laws of what codes decode to: how near, how finite, in which frame, and how attention reads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from hypothesis import strategies as st

from kvcompress.codec import Codes
from kvcompress.config import options_of
from kvcompress.errors import ConfigError
from kvcompress.stages.rope import Unrotated
from kvcompress.testing.data import Tokens, hostile_tokens, plain_keys, tokens
from kvcompress.testing.law import (
    ALIKE,
    Draw,
    law,
    numbers,
    require,
    require_close,
    require_resemblance,
    require_same_decoding,
)
from kvcompress.testing.oracles import rope
from kvcompress.testing.strategies import hostile_kinds, layers, seeds
from kvcompress.testing.subject import Bound, Subject, coded


def decode(bound: Bound, came: Tokens, constants: Any = None) -> tuple[mx.array, mx.array]:
    """What tokens become."""
    codes = bound.codec.encode(came.keys, came.values, came.positions, constants)
    return bound.codec.decode(codes, came.positions)


def distortions(bound: Bound, came: Tokens) -> tuple[float, float]:
    """Relative squared error of keys and of values, in all."""
    out = []
    for got, wanted in zip(decode(bound, came), (came.keys, came.values), strict=True):
        a, b = numbers(got), numbers(wanted)
        out.append(float(((a - b) ** 2).sum() / (b**2).sum()))
    return out[0], out[1]


class QualityLaws(Subject):
    """Laws of decoding, and of attention that reads codes."""

    @law()
    def test_decoded_rows_resemble_what_came(self, draw: Draw) -> None:
        """A codec that does not point where its input points is of no use at any size."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        came, _ = coded(bound, 24, seed=seed)
        for got, wanted, part in zip(
            decode(bound, came), (came.keys, came.values), ("keys", "values"), strict=True
        ):
            fields = [f for f in bound.codec.schema.fields if f.name.startswith(f"{part[0]}.")]
            bits = sum(f.payload_bits for f in fields) / wanted.shape[-1]
            # Of Gaussian channels no code of fewer bits keeps more than 1 - 4**-bits of the energy.
            least = ALIKE if bits >= 1 else 0.4 * (1 - 4.0**-bits) ** 0.5
            require_resemblance(got, wanted, part, least)

    @law()
    def test_hostile_values_stay_in_bounds(self, draw: Draw) -> None:
        """Norms and rotations in float16 overflow; a zero row divides by zero."""
        bound = self.draw_bound(draw)
        kind, seed = draw(hostile_kinds(), "kind"), draw(seeds(), "seed")
        came = hostile_tokens(bound.layer, kind, 12, seed=seed)
        for got, wanted, pipeline, part in zip(
            decode(bound, came),
            (came.keys, came.values),
            (bound.codec.keys, bound.codec.values),
            ("keys", "values"),
            strict=True,
        ):
            a, b = numbers(got), numbers(wanted)
            require(np.isfinite(a).all(), f"{part}: {kind}: not finite")
            off = np.linalg.norm(a - b, axis=-1).max()
            mean = pipeline.centre.mean
            known = 0.0 if mean is None else np.linalg.norm(numbers(mean), axis=-1).max()
            allowed = 2.1 * (np.linalg.norm(b, axis=-1).max() + known) + 1.0
            require(off <= allowed, f"{part}: {kind}: off by {off:.3g}, allowed {allowed:.3g}")

    @law()
    def test_size_does_not_hurt(self, draw: Draw) -> None:
        """Rows of 3,000s have an infinite norm in float16; small ones may vanish."""
        if self.is_calibrated():
            pytest.skip("tables fitted to tokens of one size need not serve another")
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        if bound.codec.keys.centre.mean is not None or bound.codec.values.centre.mean is not None:
            return  # a mean of one size is taken out
        power = draw(st.sampled_from((-4, 5, 9)), "power of two")
        came, _ = coded(bound, 24, seed=seed)
        factor = mx.array(2.0**power, bound.layer.mx_dtype)
        scaled = Tokens(came.queries, came.keys * factor, came.values * factor)
        exact = self.can("scale-equivariant") and bound.layer.dtype == "float32"
        for got, wanted, plain, part in zip(
            decode(bound, scaled),
            (scaled.keys, scaled.values),
            decode(bound, came),
            ("keys", "values"),
            strict=True,
        ):
            a, b, once = numbers(got), numbers(wanted), numbers(plain) * 2.0**power
            if exact:
                require_same_decoding(a, once, b, f"{part}: times 2**{power}")
            ours, before = (float(np.linalg.norm(x - b) / np.linalg.norm(b)) for x in (a, once))
            require(
                ours <= 1.5 * before + 0.02,
                f"{part}: times 2**{power} has a relative error of {ours:.3g}, not {before:.3g}",
            )

    @law(share=0.3)
    def test_half_precision_is_coded_as_single(self, draw: Draw) -> None:
        """A norm or a rotation computed in float16 overflows where its input does not."""
        bound, seed = self.draw_bound(draw, layers(dtypes=("float16",))), draw(seeds(), "seed")
        layer = evolve(bound.layer, dtype="float32")
        single = Bound(bound.method, layer, bound.method.bind(layer))
        kind = draw(st.sampled_from(("ordinary", "constant", "one huge channel")), "kind")
        if kind == "ordinary":
            came = tokens(bound.layer, 24, seed=seed)
        else:
            came = hostile_tokens(bound.layer, kind, 24, seed=seed)
        queries, keys, values = (
            x.astype(mx.float32) for x in (came.queries, came.keys, came.values)
        )
        wide = Tokens(queries, keys, values)
        for got, wanted, x, part in zip(
            decode(bound, came),
            decode(single, wide),
            (came.keys, came.values),
            ("keys", "values"),
            strict=True,
        ):
            require_same_decoding(got, wanted, x, f"{part}: {kind} in float16 and in float32")

    @law(share=0.2)
    def test_more_bits_distort_less(self, draw: Draw) -> None:
        """An error that stops falling points to a wrong level table or a lost plane."""
        if "bits" not in {option.name for option in options_of(self.cls)}:
            pytest.skip("the method has no option `bits`")
        layer, seed = draw(layers(dtypes=("float32",)), "layer"), draw(seeds(), "seed")
        ladder = []
        for bits in range(1, 13):
            try:
                bound = self.standard(layer, bits=bits)
            except ConfigError:
                continue
            ladder.append((bits, distortions(bound, tokens(layer, 64, seed=seed))))
        if len(ladder) < 2:
            pytest.skip("the layer takes one number of bits")
        for part in (0, 1):
            errors = [error[part] for _, error in ladder]
            require(
                all(b <= 1.02 * a + 1e-6 for a, b in pairwise(errors))
                and errors[-1] < 0.75 * errors[0],
                f"{('keys', 'values')[part]}: distortion by bits "
                f"{[(bits, round(error[part], 5)) for bits, error in ladder]}",
            )

    @law(share=0.1)
    def test_outlier_channels_yield_to_bits(self, draw: Draw) -> None:
        """A few channels 50 times the others ruin attention long before they show in a cosine.

        What counts is the softmax over scores of queries that do not even see those channels.
        """
        if "bits" not in {option.name for option in options_of(self.cls)}:
            pytest.skip("the method has no option `bits`")
        if self.is_calibrated():
            pytest.skip("tables fitted to other tokens know nothing of these channels")
        seed = draw(seeds(), "seed")
        ladder = []
        for bits in range(1, 9):
            try:
                ladder.append((bits, _outlier_divergence(self.standard(bits=bits), seed)))
            except ConfigError:
                continue
        require(
            ladder[-1][1] < min(0.1, 0.75 * ladder[0][1] + 1e-3),
            f"divergence of attention by bits: {[(b, round(x, 4)) for b, x in ladder]}",
        )

    @law()
    def test_codes_do_not_depend_on_position(self, draw: Draw) -> None:
        """A method that turns keys back must use the model's own base, pairs and scale."""
        bound = self.draw_bound(draw, layers(dtypes=("float32",)))
        if not isinstance(bound.codec.rope, Unrotated):
            return  # codes the keys as they stand
        place, seed = draw(st.sampled_from((1, 100, 5000)), "position"), draw(seeds(), "seed")
        _, constants = coded(bound, 80)
        near, far = (tokens(bound.layer, 1, seed=seed, start=p) for p in (0, place))
        plain = plain_keys(bound.layer, 1, seed=seed)
        at_zero, at_place = (numbers(decode(bound, came, constants)[0]) for came in (near, far))
        moved = rope(at_zero, [place], bound.layer.rotary)
        require_same_decoding(at_place, moved, rope(plain, [place], bound.layer.rotary), "keys")

    @law()
    def test_the_centre_is_the_mean_before_rope(self, draw: Draw) -> None:
        """Keys that are one vector, rotated, leave nothing to code once it is taken out."""
        bound = self.draw_bound(draw, layers(dtypes=("float32",)))
        if not bound.codec.keys.centre.tokens:
            return  # takes no mean from the sequence
        start = draw(st.sampled_from((0, 4, 1000)), "first position")
        one = plain_keys(bound.layer, 1)
        count = bound.codec.keys.centre.tokens + 8
        positions = range(start, start + count)
        keys = mx.array(
            rope(np.repeat(one, count, axis=2), positions, bound.layer.rotary).astype(np.float32)
        )
        values = tokens(bound.layer, count).values
        came = Tokens(keys, keys, values, start)
        size = 1e-2 * float(np.abs(one).max())
        require_close(decode(bound, came)[0], keys, size, "keys that are their own mean")

    @law()
    def test_scores_are_those_of_decoded_keys(self, draw: Draw) -> None:
        """Attention on codes may take any path, to the same result."""
        bound = self.draw_bound(draw, layers(dtypes=("float32",)))
        rows, seed = draw(st.sampled_from((1, 5)), "queries"), draw(seeds(), "seed")
        if not self.reads_decoded_keys(bound):
            return  # differs on purpose
        came, codes = _codes(bound, 70 + rows, seed)
        ready, queries, places = _queries(bound, came, rows)
        cut = _first(codes, 70)
        keys = numbers(bound.codec.decode(cut, range(70))[0])
        wanted = numbers(queries) @ keys.swapaxes(-1, -2)
        got = bound.codec.scores(ready, cut, range(70))
        size = 2e-4 * float(np.abs(numbers(queries)).sum(-1).max() * np.abs(keys).max()) + 1e-4
        require_close(got, wanted, size, f"scores of queries at {places}")

    @law()
    def test_mixed_values_are_those_of_decoded_ones(self, draw: Draw) -> None:
        """Sums in code space come back once a step: means and maps must not be lost there."""
        bound, seed = self.draw_bound(draw, layers(dtypes=("float32",))), draw(seeds(), "seed")
        _, codes = _codes(bound, 70, seed)
        values = numbers(bound.codec.decode(codes, range(70))[1])
        chance = np.random.default_rng(seed).random((1, bound.layer.kv_heads, 3, 70))
        weights = mx.array(chance.astype(np.float32))
        mass = weights.sum(axis=-1, keepdims=True)
        got = bound.codec.outputs(bound.codec.mix(weights, codes), mass, codes.constants)
        size = 2e-4 * 70 * float(np.abs(values).max()) + 1e-4
        require_close(got, chance @ values, size, "weighted sums of values")


def _codes(bound: Bound, count: int, seed: int) -> tuple[Tokens, Codes]:
    came, constants = coded(bound, count, seed=seed)
    return came, bound.codec.encode(came.keys, came.values, came.positions, constants)


def _first(codes: Codes, count: int) -> Codes:
    return Codes({k: a[:, :, :count] for k, a in codes.fields.items()}, codes.constants)


def _queries(bound: Bound, came: Tokens, rows: int) -> tuple[Any, mx.array, range]:
    """The last tokens' queries, grouped by KV head, as attention makes them ready."""
    places = range(len(came) - rows, len(came))
    layer = bound.layer
    grouped = came.queries[:, :, places.start :].astype(mx.float32)
    grouped = grouped.reshape(1, layer.kv_heads, layer.group * rows, layer.head_dim)
    return bound.codec.queries(grouped, places), grouped, places


def _outlier_divergence(bound: Bound, seed: int) -> float:
    """Mean KL of attention weights, keys having outlier channels that queries do not see."""
    layer, count = bound.layer, 64
    drawn = np.random.default_rng([seed, 4])
    keys = drawn.standard_normal((1, layer.kv_heads, count, layer.head_dim))
    outliers = drawn.choice(layer.head_dim, 3, replace=False)
    keys[..., outliers] *= 50
    queries = drawn.standard_normal((1, layer.kv_heads, 16, layer.head_dim))
    queries[..., outliers] = 0
    came = mx.array(keys.astype(np.float32)).astype(layer.mx_dtype)
    values = tokens(layer, count).values
    decoded = decode(bound, Tokens(came, came, values))[0]
    logits = [
        queries @ numbers(x).swapaxes(-1, -2) / np.sqrt(layer.head_dim) for x in (came, decoded)
    ]
    true, ours = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in logits)
    return float((np.exp(true) * (true - ours)).sum(axis=-1).mean())
