"""Laws of attention over exact and coded tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from kvcompress.cache.drafts import LONGEST
from kvcompress.layers import LayerSpec
from kvcompress.testing.data import tokens
from kvcompress.testing.law import Draw, law, numbers, require, require_close
from kvcompress.testing.oracles import attention
from kvcompress.testing.strategies import layers, masks, seeds
from kvcompress.testing.subject import Subject, step_of

_SCALE = 0.125
_LAST = (1, 1, 2, 17)
BUDGETS = (1, 1 << 16, 64 << 20)
"""Bytes of transients: tiles of the least size, a few, and all tokens at once."""


class AttentionLaws(Subject):
    """Laws of what a step's queries get."""

    @law()
    def test_attention_is_that_of_dense_arrays(self, draw: Draw) -> None:
        """Causal, bool and additive masks, grouped heads, sink logits, any tiling."""
        small = layers(head_dims=(36, 64, 80, 128))
        bound = self.draw_bound(draw, small, **self.draw_cache_options(draw))
        if not self.reads_decoded_keys(bound):
            return  # far keys are met by other scores on purpose
        layer, batch = bound.layer, draw(st.integers(1, 2), "batch")
        early, last = draw(st.integers(0, 150), "tokens before"), draw(st.sampled_from(_LAST))
        came = tokens(layer, early + last, batch=batch, seed=draw(seeds(), "seed"))
        sizes = (batch, layer.query_heads, last, early + last)
        mask = draw(masks(*sizes, layer.mx_dtype), "mask")
        logits = self._draw_sinks(draw, layer)
        cache = self.new_cache(bound, draw(st.sampled_from(BUDGETS), "budget"))
        if early:
            first = came.part(0, early)
            cache.update_and_fetch(first.keys, first.values)
        new = came.part(early, early + last)
        cut = 1 < last <= LONGEST and cache.coded_after(last - 1) > cache.coded_after(0)
        keys, values = cache.update_and_fetch(new.keys, new.values)
        out = step_of(keys).attend(new.queries, scale=_SCALE, mask=mask, sinks=logits)
        if cut and isinstance(mask, str):
            return  # read as if token by token, which is a law of its own
        require(
            out.dtype == new.queries.dtype
            and out.shape == (*new.queries.shape[:3], layer.value_dim),
            f"attention gives {out.dtype} {out.shape}",
        )
        wanted = attention(
            numbers(new.queries),
            numbers(keys),
            numbers(values),
            scale=_SCALE,
            mask=_plain(mask),
            sinks=None if logits is None else numbers(logits),
        )
        size = {"float32": 5e-4, "float16": 2e-2, "bfloat16": 1e-1}[layer.dtype]
        require_close(out, wanted, size * (1 + float(np.abs(wanted).max())), "attention")

    def _draw_sinks(self, draw: Draw, layer: LayerSpec) -> mx.array | None:
        if not draw(st.booleans(), "sink logits"):
            return None
        chance = np.random.default_rng(draw(seeds(), "logits"))
        logits = 2 * chance.standard_normal(layer.query_heads)
        return mx.array(logits.astype(np.float32)).astype(layer.mx_dtype)

    @law(share=0.3)
    def test_a_short_chunk_is_read_as_if_token_by_token(self, draw: Draw) -> None:
        """Drafts of a second model must not change what a token reads, wherever a block ends."""
        small = layers(head_dims=(64, 80))
        bound = self.draw_bound(draw, small, **self.draw_cache_options(draw))
        early, last = (
            draw(st.integers(0, 150), "tokens before"),
            draw(st.integers(2, LONGEST), "drafts"),
        )
        came = tokens(bound.layer, early + last, seed=draw(seeds(), "seed"))
        outs = []
        for sizes in ([last], [1] * last):
            cache, start, parts = self.new_cache(bound), early, []
            if early:
                first = came.part(0, early)
                keys, _ = cache.update_and_fetch(first.keys, first.values)
                mx.eval(step_of(keys).attend(first.queries, scale=_SCALE, mask="causal"))
            for size in sizes:
                new = came.part(start, start + size)
                keys, _ = cache.update_and_fetch(new.keys, new.values)
                mask = "causal" if size > 1 else None
                parts.append(step_of(keys).attend(new.queries, scale=_SCALE, mask=mask))
                start += size
            outs.append(numbers(mx.concatenate(parts, axis=2)))
        slack = {"float32": 5e-4, "float16": 2e-2, "bfloat16": 1e-1}[bound.layer.dtype]
        largest = 1 + float(np.abs(outs[1]).max())
        require_close(outs[0], outs[1], slack * largest, "at once and one by one")

    @law(share=0.2)
    def test_rows_that_see_nothing_are_finite(self, draw: Draw) -> None:
        """Padded rows of a batch see no token; a NaN there spreads through the model."""
        bound = self.draw_bound(draw, **self.draw_cache_options(draw))
        came = tokens(bound.layer, 130, seed=draw(seeds(), "seed"))
        cache = self.new_cache(bound, draw(st.sampled_from(BUDGETS), "budget"))
        first, last = came.part(0, 110), came.part(110, 130)
        cache.update_and_fetch(first.keys, first.values)
        keys, _ = cache.update_and_fetch(last.keys, last.values)
        hidden = mx.zeros((20, 130), dtype=mx.bool_)
        out = numbers(step_of(keys).attend(last.queries, scale=_SCALE, mask=hidden))
        require(np.isfinite(out).all(), "a row that sees nothing is not finite")


def _plain(mask: mx.array | str | None) -> Any:
    """A mask as the oracle takes it."""
    if not isinstance(mask, mx.array):
        return mask
    return np.array(mask) if mask.dtype == mx.bool_ else numbers(mask)
