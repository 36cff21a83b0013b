"""Laws of bytes: what is claimed is what exists."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import mlx.core as mx
from hypothesis import strategies as st

from kvcompress.cache.walk import reachable_arrays
from kvcompress.testing.data import Tokens, tokens
from kvcompress.testing.law import Draw, law, require
from kvcompress.testing.strategies import seeds
from kvcompress.testing.subject import Bound, Subject, step_of

if TYPE_CHECKING:
    from kvcompress.cache.kvcache import CompressedKVCache

_TOKENS = 500
_ALIKE = 1.03
_SMALL = 4096  # bytes that no claim needs to explain
_SLACK = 320  # tokens of room that a cache may keep for those to come


class MemoryLaws(Subject):
    """Laws of what a cache takes."""

    def _fill(self, draw: Draw) -> tuple[Bound, CompressedKVCache, int]:
        """A cache that a prompt and some single tokens went through, and the bytes it took."""
        bound = self.standard(**self.draw_cache_options(draw))
        came = tokens(bound.layer, _TOKENS, seed=draw(seeds(), "seed"))
        chunk = draw(st.sampled_from((64, 200, 440)), "chunk")
        self._go(self.new_cache(bound), came, chunk)  # whatever is made once
        limit = mx.set_cache_limit(0)  # a buffer used again may be larger than what it holds
        try:
            before = _active()
            cache = self.new_cache(bound)
            self._go(cache, came, chunk)
            return bound, cache, _active() - before
        finally:
            mx.set_cache_limit(limit)

    def _go(self, cache: CompressedKVCache, came: Tokens, chunk: int) -> None:
        """Prefill in chunks, then single tokens of which only the output is computed."""
        start = 0
        while start < len(came):
            size = min(chunk, _TOKENS - 60 - start) if start < _TOKENS - 60 else 1
            part = came.part(start, start + size)
            keys, _ = cache.update_and_fetch(part.keys, part.values)
            mx.eval(step_of(keys).attend(part.queries, scale=0.125, mask="causal"))
            start += size

    @law(share=0.06)
    def test_bytes_are_those_that_exist(self, draw: Draw) -> None:
        """No copy in full precision behind the codes, no graph that grows, no kind word."""
        bound, cache, taken = self._fill(draw)
        tables = {id(a) for a in reachable_arrays([bound.codec, bound.method])}
        walked = sum(a.nbytes for a in reachable_arrays([cache]) if id(a) not in tables)
        claimed = cache.nbytes
        for what, found in (("reachable from the cache", walked), ("taken in memory", taken)):
            require(
                claimed / _ALIKE - _SMALL <= found <= claimed * _ALIKE + _SMALL,
                f"nbytes says {claimed}, {what} are {found}",
            )

    @law(share=0.06)
    def test_reports_are_arithmetic(self, draw: Draw) -> None:
        """Stored bytes are the schema's times the tokens, and room to grow stays small."""
        bound, cache, _ = self._fill(draw)
        layer, schema, report = bound.layer, bound.codec.schema, cache.report
        exact = _TOKENS - cache.tokens_coded
        row = layer.kv_heads * (layer.head_dim + layer.value_dim) * layer.mx_dtype.size
        row += schema.exact_bytes  # what the sequence keeps of an exact token beside it
        coded = cache.tokens_coded * schema.bytes_per_token + schema.constant_bytes
        require(
            report.predicted_bytes == report.stored_bytes == exact * row + coded,
            f"predicted {report.predicted_bytes}, stored {report.stored_bytes}, "
            f"by the schema {exact * row + coded}",
        )
        require(
            (report.tokens_seen, report.tokens_exact) == (_TOKENS, exact),
            f"the report names {report.tokens_seen} tokens, {report.tokens_exact} exact",
        )
        half = bound.layer.kv_heads * 2
        require(
            (report.fp16_key_bytes, report.fp16_value_bytes)
            == (
                cache.tokens_coded * half * layer.head_dim,
                cache.tokens_coded * half * layer.value_dim,
            ),
            f"the yardstick is {report.fp16_key_bytes} and {report.fp16_value_bytes} bytes",
        )
        room = _SLACK * schema.bytes_per_token + bound.method.block * row
        require(
            report.reserved_bytes <= room,
            f"{report.reserved_bytes} bytes are held for tokens to come, allowed {room}",
        )


def _active() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
