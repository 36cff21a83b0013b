"""Laws of a codec's codes: what is stored, and that each token stands for itself."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from kvcompress.cache.walk import reachable_arrays
from kvcompress.codec import Codes
from kvcompress.config import options_of
from kvcompress.schema import Field
from kvcompress.testing.data import Tokens
from kvcompress.testing.law import (
    Draw,
    law,
    require,
    require_equal,
    require_same_decoding,
)
from kvcompress.testing.random_state import random_states, stir
from kvcompress.testing.strategies import chunkings, seeds
from kvcompress.testing.subject import Bound, Subject, coded

_SMALL = 64  # bytes of an array that need not be shared
_TRANSIENT = 64 << 20  # bytes that encoding may hold beside a few copies of what it encodes


def encode(bound: Bound, came: Tokens, constants: dict[str, mx.array]) -> Codes:
    """The codes of tokens where they stand."""
    return bound.codec.encode(came.keys, came.values, came.positions, constants)


def require_same_codes(bound: Bound, got: Codes, wanted: Codes, came: Tokens, what: str) -> None:
    """Demand codes that decode alike, but for round-off."""
    pairs = zip(
        bound.codec.decode(got, came.positions),
        bound.codec.decode(wanted, came.positions),
        (came.keys, came.values),
        ("keys", "values"),
        strict=True,
    )
    for a, b, x, part in pairs:
        require_same_decoding(a, b, x, f"{part}: {what}")


class CodecLaws(Subject):
    """Laws of the schema and of encoding."""

    @law()
    def test_fields_are_as_declared(self, draw: Draw) -> None:
        """Stores allocate by the schema; an array of another shape or dtype would be cast."""
        bound = self.draw_bound(draw)
        batch, count = draw(st.integers(1, 2), "batch"), draw(st.integers(1, 20), "tokens")
        came, constants = coded(bound, count, batch=batch)
        codes = encode(bound, came, constants)
        schema = bound.codec.schema
        _require_fields(codes.fields, schema.fields, batch, count)
        _require_fields(codes.constants, schema.constants, batch, 1)
        for field in schema.fields:
            require(
                field.heads in (1, bound.layer.kv_heads)
                and field.name.startswith(("k.", "v."))
                and 0 <= field.payload_bits * field.heads <= 8 * field.bytes_per_token,
                f"{field} is not one a head or one for all, or has more payload than room",
            )

    @law()
    def test_stored_bytes_are_predicted(self, draw: Draw) -> None:
        """Advertised sizes are sizes of arrays, not of a formula."""
        bound, count = self.draw_bound(draw), draw(st.integers(1, 40), "tokens")
        came, constants = coded(bound, count)
        codes, schema = encode(bound, came, constants), bound.codec.schema
        mx.eval(*codes.fields.values(), *codes.constants.values())
        predicted = count * schema.bytes_per_token + schema.constant_bytes
        require(
            codes.nbytes == predicted,
            f"{count} tokens take {codes.nbytes} bytes, predicted {predicted}",
        )

    @law()
    def test_chunking_does_not_change_codes(self, draw: Draw) -> None:
        """One codec for prefill and for single tokens: no second basis, no chunk's own scale."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        came, constants = coded(bound, 40, seed=seed)
        whole, start = encode(bound, came, constants), 0
        parts = []
        for size in draw(chunkings(40), "chunks"):
            parts.append(encode(bound, came.part(start, start + size), constants))
            start += size
        joined = {k: mx.concatenate([p.fields[k] for p in parts], axis=2) for k in whole.fields}
        require_same_codes(bound, Codes(joined, constants), whole, came, "in chunks and at once")

    @law()
    def test_batch_rows_are_coded_apart(self, draw: Draw) -> None:
        """A row's codes may not depend on its neighbours in the batch."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        came, constants = coded(bound, 20, batch=3, seed=seed)
        together = encode(bound, came, constants)
        for row in range(3):
            alone = came.rows(row, row + 1)
            own = bound.codec.begin(alone.keys, alone.values, alone.positions)
            cut = Codes(
                {k: a[row : row + 1] for k, a in together.fields.items()},
                {k: a[row : row + 1] for k, a in together.constants.items()},
            )
            wanted = encode(bound, alone, own)
            require_same_codes(bound, cut, wanted, alone, f"row {row} in a batch and alone")

    @law()
    def test_heads_are_coded_apart(self, draw: Draw) -> None:
        """Another head's content may not show: an axis taken for another would mix them."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        heads = bound.layer.kv_heads
        came, constants = coded(bound, 20, seed=seed)
        other, _ = coded(bound, 20, seed=seed + 1)
        keep = mx.arange(heads).reshape(1, heads, 1, 1) == draw(st.integers(0, heads - 1), "head")
        mixed = Tokens(
            came.queries,
            mx.where(keep, came.keys, other.keys),
            mx.where(keep, came.values, other.values),
        )
        first = encode(bound, came, constants)
        second = encode(bound, mixed, bound.codec.begin(mixed.keys, mixed.values, mixed.positions))
        for field in bound.codec.schema.fields:
            if field.heads != heads or _shares_a_field(bound, field.name):
                continue  # what heads share by declaration couples them
            require_equal(
                mx.where(keep, first.fields[field.name], 0),
                mx.where(keep, second.fields[field.name], 0),
                f"{field.name}: codes of a head whose neighbours changed",
            )

    @law()
    def test_heads_may_be_permuted(self, draw: Draw) -> None:
        """Permuting heads permutes codes, where no table is a head's own."""
        if self.can("unlike-heads") or self.is_calibrated():
            pytest.skip("the method codes heads by tables of their own")
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        codec = bound.codec  # a calibrated mean is its head's own
        assume(codec.keys.centre.mean is None and codec.values.centre.mean is None)
        order = mx.array(draw(st.permutations(range(bound.layer.kv_heads)), "order"))
        came, constants = coded(bound, 20, seed=seed)
        turned = Tokens(came.queries, came.keys[:, order], came.values[:, order])
        codes = encode(bound, came, constants)
        wanted = Codes(
            {k: a[:, order] if a.shape[1] > 1 else a for k, a in codes.fields.items()},
            {k: a[:, order] for k, a in codes.constants.items()},
        )
        got = encode(bound, turned, bound.codec.begin(turned.keys, turned.values, turned.positions))
        require_same_codes(bound, got, wanted, turned, "heads permuted before and after")

    @law()
    def test_no_tokens_are_no_trouble(self, draw: Draw) -> None:
        """Zero tokens code to nothing and back."""
        bound = self.draw_bound(draw)
        came, constants = coded(bound, 4)
        none = came.part(0, 0)
        codes = encode(bound, none, constants)
        keys, values = bound.codec.decode(codes, none.positions)
        require_equal(keys, none.keys, "keys of no tokens")
        require_equal(values, none.values, "values of no tokens")

    @law(share=0.5)
    def test_equal_binds_are_equal(self, draw: Draw) -> None:
        """A method made again gives the same codes, and shares the tables in memory."""
        bound, seed = self.draw_bound(draw), draw(seeds(), "seed")
        options = {o.name: getattr(bound.method, o.name) for o in options_of(self.cls)}
        method = self.build(**options)
        again = Bound(method, bound.layer, method.bind(bound.layer))
        came, constants = coded(bound, 20, seed=seed)
        first, second = encode(bound, came, constants), encode(again, came, constants)
        for name, array in first.fields.items():
            require_equal(second.fields[name], array, f"{name}: codes of a second bind")
        ours = {id(a): a for a in reachable_arrays([bound.codec])}
        theirs = {id(a) for a in reachable_arrays([again.codec])}
        doubled = [a.shape for i, a in ours.items() if i not in theirs and a.nbytes > _SMALL]
        require(not doubled, f"a second bind makes tables of shapes {doubled} anew")

    @law(share=0.5)
    def test_seeds_matter(self, draw: Draw) -> None:
        """A seed that is taken and not used gives every user the same tables."""
        if "seed" not in {option.name for option in self.drawable_options()}:
            pytest.skip("the method has no option `seed`")
        codes = []
        for seed in draw(st.tuples(st.integers(0, 999), st.integers(1000, 2000)), "seeds"):
            bound = self.standard(seed=seed)
            came, constants = coded(bound, 8)
            codes.append(encode(bound, came, constants))
        same = all(
            bool(mx.array_equal(a, codes[1].fields[name])) for name, a in codes[0].fields.items()
        )
        require(not same, "codes under two seeds are the same")

    @law(share=0.5)
    def test_random_state_is_left_alone(self, draw: Draw) -> None:
        """The user's own random numbers may not change because a cache was made."""
        stir()
        before = random_states()
        bound = self.draw_bound(draw, **self.draw_cache_options(draw))
        came, constants = coded(bound, 10)
        mx.eval(*bound.codec.decode(encode(bound, came, constants), came.positions))
        cache = self.new_cache(bound)
        mx.eval(*cache.update_and_fetch(came.keys, came.values))
        changed = [name for name, state in random_states().items() if state != before[name]]
        require(not changed, f"the random state of {', '.join(changed)} changed")

    @law(share=0.1)
    def test_encoding_needs_little_memory(self, draw: Draw) -> None:
        """Distances to every entry of a codebook, for all tokens at once, take gigabytes."""
        bound = self.standard()
        came, constants = coded(bound, 2048)
        mx.eval(list(constants.values()))
        mx.synchronize()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        codes = encode(bound, came, constants)
        mx.eval(list(codes.fields.values()))
        peak = mx.get_peak_memory() - held
        allowed = _TRANSIENT + 24 * (came.keys.nbytes + came.values.nbytes)
        require(
            peak <= allowed,
            f"encoding {len(came)} tokens peaks at {peak >> 20} MiB, allowed {allowed >> 20}",
        )


def _require_fields(
    got: dict[str, mx.array], wanted: tuple[Field, ...], batch: int, count: int
) -> None:
    names = [field.name for field in wanted]
    require(
        sorted(got) == sorted(names) and len(set(names)) == len(names),
        f"fields {sorted(got)} against declared {sorted(names)}",
    )
    for field in wanted:
        array, shape = got[field.name], (batch, field.heads, count, field.width)
        dtype = str(array.dtype).removeprefix("mlx.core.")
        require(
            array.shape == shape and dtype == field.dtype,
            f"{field.name} is {dtype} {array.shape}, declared {field.dtype} {shape}",
        )


def _shares_a_field(bound: Bound, name: str) -> bool:
    """Whether the keys, or the values, keep a field for all heads together."""
    prefix = name[:2]
    return any(
        field.heads < bound.layer.kv_heads
        for field in bound.codec.schema.fields
        if field.name.startswith(prefix)
    )
