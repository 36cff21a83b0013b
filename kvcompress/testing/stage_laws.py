"""Laws of the stages that a codec is made of."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from kvcompress.stages.base import Coder, Quantiser, Transform
from kvcompress.testing.law import Draw, law, numbers, require, require_close
from kvcompress.testing.oracles import nearest
from kvcompress.testing.strategies import seeds
from kvcompress.testing.subject import Bound, Subject

_TOKENS = 6


def _normal(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def _transforms(bound: Bound) -> Iterator[tuple[str, Transform]]:
    yield "keys", bound.codec.keys.transform
    yield "values", bound.codec.values.transform


def _coders(bound: Bound) -> Iterator[tuple[str, Coder]]:
    yield "keys", bound.codec.keys.coder
    yield "values", bound.codec.values.coder


def _quantisers(bound: Bound) -> Iterator[tuple[str, Quantiser]]:
    for part, coder in _coders(bound):
        kind = type(coder)
        for field in attrs.fields(kind) if attrs.has(kind) else ():
            stage = getattr(coder, field.name)
            if isinstance(stage, Quantiser):
                yield f"{part}: {field.name.lstrip('_')}", stage


class StageLaws(Subject):
    """Laws of transforms, quantisers and coders."""

    @law()
    def test_transforms_invert(self, draw: Draw) -> None:
        """``inverse(forward(x)) = x``: a map that is taken for its own inverse is not always."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        for part, transform in _transforms(bound):
            x = _normal(seed, 1, bound.layer.kv_heads, _TOKENS, transform.dim)
            back = transform.inverse(transform.forward(x))
            require_close(back, x, 5e-3, f"{part}: inverse(forward(x)) against x")

    @law()
    def test_transforms_keep_scores(self, draw: Draw) -> None:
        """``<query(q), forward(x)> = <q, x>``: the query must take the dual map, not the map."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        for part, transform in _transforms(bound):
            x = _normal(seed, 1, bound.layer.kv_heads, _TOKENS, transform.dim)
            q = _normal(seed + 1, 1, bound.layer.kv_heads, _TOKENS, transform.dim)
            got = transform.query(q) @ transform.forward(x).swapaxes(-1, -2)
            wanted = numbers(q) @ numbers(x).swapaxes(-1, -2)
            size = 1e-3 * float(np.abs(wanted).max()) + 5e-3
            require_close(got, wanted, size, f"{part}: <query(q), forward(x)> against <q, x>")

    @law()
    def test_transforms_are_linear(self, draw: Draw) -> None:
        """Attention mixes values in code space, which only a linear inverse allows."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        for part, transform in _transforms(bound):
            a, b = (
                _normal(s, 1, bound.layer.kv_heads, _TOKENS, transform.dim)
                for s in (seed, seed + 1)
            )
            for name, apply in (("forward", transform.forward), ("inverse", transform.inverse)):
                wanted = 3.0 * apply(a) - apply(b)
                size = 1e-3 * float(mx.abs(wanted).max()) + 1e-4
                require_close(apply(3.0 * a - b), wanted, size, f"{part}: {name}(3a - b)")

    @law()
    def test_quantisers_choose_the_nearest(self, draw: Draw) -> None:
        """Codes in range, each the nearest of its codebook by brute force: no off-by-one cell."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        found = list(_quantisers(bound))
        if not found:
            pytest.skip("no coder shows a quantiser")
        for part, quantiser in found:
            u = 1.3 * _normal(seed, 1, bound.layer.kv_heads, _TOKENS, quantiser.dim)
            codes = quantiser.encode(u)
            wide = mx.uint16 if quantiser.bits > 8 else mx.uint8
            require(
                codes.dtype == wide and codes.shape == (*u.shape[:3], quantiser.codes),
                f"{part}: codes are {codes.dtype} {codes.shape}",
            )
            require(
                int(codes.max()) < 2**quantiser.bits,
                f"{part}: code {int(codes.max())} takes more than {quantiser.bits} bits",
            )
            _check_nearest(part, quantiser, u, codes)

    @law()
    def test_coders_attend_as_they_decode(self, draw: Draw) -> None:
        """``scores`` and ``mix`` read the same codes as ``decode``: a fast path may not drift."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        rows, count = draw(_counts(), "rows"), draw(_counts(), "tokens")
        heads = bound.layer.kv_heads
        for part, coder in _coders(bound):
            dim = bound.layer.head_dim if part == "keys" else bound.layer.value_dim
            fields = coder.encode(_normal(seed, 1, heads, count, dim))
            decoded = numbers(coder.decode(fields))
            q = _normal(seed + 1, 1, heads, rows, dim)
            weights = mx.softmax(_normal(seed + 2, 1, heads, rows, count), axis=-1)
            scores = numbers(q) @ decoded.swapaxes(-1, -2)
            size = 1e-4 * float(np.abs(numbers(q)).sum(-1).max() * np.abs(decoded).max()) + 1e-5
            require_close(coder.scores(q, fields), scores, size, f"{part}: scores")
            mixed = numbers(weights) @ decoded
            size = 1e-4 * float(np.abs(decoded).max()) + 1e-5
            require_close(coder.mix(weights, fields), mixed, size, f"{part}: mix")


def _counts() -> st.SearchStrategy[int]:
    return st.sampled_from((1, 2, 5, 33))


def _check_nearest(part: str, quantiser: Quantiser, u: mx.array, codes: mx.array) -> None:
    """Compare with brute force where the vectors split into pieces coded by themselves.

    A quantiser's ``metric``, ``(H or 1, pieces or 1, s, s)``, says by which distance: ``x M x^T``.
    """
    pieces, heads = quantiser.codes, u.shape[1]
    width, left_over = divmod(quantiser.dim, pieces)
    if left_over:
        return  # the codes of a vector act together: there is no nearest entry for each
    choices = mx.arange(2**quantiser.bits).reshape(1, 1, -1, 1)
    every = mx.broadcast_to(choices, (1, heads, 2**quantiser.bits, pieces)).astype(codes.dtype)
    book = numbers(quantiser.decode(every)).reshape(heads, -1, pieces, width)
    got = numbers(quantiser.decode(codes)).reshape(heads, -1, pieces, width)
    chosen = np.array(codes[0]).astype(np.int64)
    x = numbers(u).reshape(heads, -1, pieces, width)
    metric = getattr(quantiser, "metric", None)
    square = np.eye(width)[None, None] if metric is None else numbers(metric)
    root = np.broadcast_to(np.linalg.cholesky(square), (heads, pieces, width, width))
    for h in range(heads):
        for p in range(pieces):
            alone = book[h, chosen[h, :, p], p]
            if not np.allclose(alone, got[h, :, p], atol=1e-5):
                return  # they act together after all
            _, best = nearest(x[h, :, p] @ root[h, p], book[h, :, p] @ root[h, p])
            mine = (((x[h, :, p] - got[h, :, p]) @ root[h, p]) ** 2).sum(axis=-1)
            worst = float((mine - best).max())
            require(
                worst <= 1e-4 * (1 + float(best.max())),
                f"{part}: a code's entry is further than the nearest one, by {worst:.3g} "
                "in squared distance",
            )
