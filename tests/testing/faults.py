"""Methods and caches that are wrong in one way each, with the law that must catch them.

Each is of a kind that somebody once shipped.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import mlx.core as mx
import numpy as np
from attrs import evolve, field, frozen

from kvcompress.cache.kvcache import CompressedKVCache
from kvcompress.cache.step import Step
from kvcompress.codec import Codes, KVCodec
from kvcompress.config import integer
from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.schema import Schema
from kvcompress.stages.base import Coder, Fields, Transform
from kvcompress.stages.rope import PreRope, Queries, RopePolicy
from kvcompress.testing import MethodConformance
from tests.testing.sound import Flip, Grid, MaxAbs, Sound

FAULTS: dict[str, tuple[str, type[MethodConformance]]] = {}
"""By name: the law that must catch it, and its suite."""


def suite(name: str, law: str, **body: Any) -> type[MethodConformance]:
    made = type(f"Suite{name}", (MethodConformance,), {"__module__": __name__, **body})
    setattr(sys.modules[__name__], made.__name__, made)  # another process imports it by name
    FAULTS[f"{law.removeprefix('test_')}-{name}"] = (law, made)
    return made


def method_fault(law: str, **body: Any) -> Callable[[type[Sound]], type[Sound]]:
    def mark(cls: type[Sound]) -> type[Sound]:
        suite(cls.__name__, law, method=cls, **body)
        return cls

    return mark


def cache_fault(law: str) -> Callable[[type[Any]], type[Any]]:
    def mark(cls: type[Any]) -> type[Any]:
        def new_cache(self: Any, bound: Any, budget: int = 64 << 20) -> Any:
            return cls(bound.method, bound.layer, bound.codec, budget=budget)

        suite(cls.__name__, law, method=Sound, new_cache=new_cache)
        return cls

    return mark


def coder_fault(law: str, **body: Any) -> Callable[[type[Any]], type[Any]]:
    """The method whose coder is the class."""

    def mark(cls: type[Any]) -> type[Any]:
        @frozen(kw_only=True)
        class WithCoder(Sound):
            def coder(self, dim: int, heads: int) -> Coder:
                made: Coder = cls(Grid(self.bits, dim), heads)
                return made

        suite(cls.__name__, law, method=WithCoder, **body)
        return cls

    return mark


def transform_fault(law: str) -> Callable[[type[Any]], type[Any]]:
    """The method whose transform is the class."""

    def mark(cls: type[Any]) -> type[Any]:
        @frozen(kw_only=True)
        class WithTransform(Sound):
            def transform(self, dim: int) -> Transform:
                made: Transform = cls(dim, self.seed)
                return made

        suite(cls.__name__, law, method=WithTransform)
        return cls

    return mark


def codec_fault(law: str, **options: Any) -> Callable[[type[Any]], type[Any]]:
    """The method whose codec is the class."""

    def mark(cls: type[Any]) -> type[Any]:
        @frozen(kw_only=True)
        class WithCodec(Sound):
            def bind(self, layer: LayerSpec) -> KVCodec:
                sound = Sound.bind(self, layer)
                made: KVCodec = cls(layer, sound.keys, sound.values, sound.rope)
                return made

        suite(cls.__name__, law, method=WithCodec, options=options)
        return cls

    return mark


# -- stages --------------------------------------------------------------------------------


@transform_fault("test_transforms_invert")
@frozen(eq=False)
class TakenForItsOwnInverse(Flip):
    def inverse(self, z: mx.array) -> mx.array:
        return self.forward(z)


@transform_fault("test_transforms_keep_scores")
@frozen(eq=False)
class QueryByTheMapItself(Flip):
    def query(self, q: mx.array) -> mx.array:
        return self.forward(q)


@transform_fault("test_transforms_are_linear")
@frozen(eq=False)
class Shifted(Flip):
    def forward(self, x: mx.array) -> mx.array:
        return (x - 0.5) * self.table

    def inverse(self, z: mx.array) -> mx.array:
        return z / self.table + 0.5


@frozen
class RoundedDown(Grid):
    def encode(self, u: mx.array) -> mx.array:
        return mx.floor((mx.clip(u, -1.0, 1.0) + 1.0) * (self.top / 2)).astype(mx.uint8)


@frozen
class OneTooMany(Grid):
    def encode(self, u: mx.array) -> mx.array:
        return super().encode(u) + 1


@method_fault("test_quantisers_choose_the_nearest")
@frozen(kw_only=True)
class OffByHalfACell(Sound):
    def coder(self, dim: int, heads: int) -> Coder:
        return MaxAbs(RoundedDown(self.bits, dim), heads)


@method_fault("test_quantisers_choose_the_nearest", options={"bits": 5})
@frozen(kw_only=True)
class CodeOutOfRange(Sound):
    def coder(self, dim: int, heads: int) -> Coder:
        return MaxAbs(OneTooMany(self.bits, dim), heads)


@coder_fault("test_coders_attend_as_they_decode")
@frozen
class ScoresWithoutScale(MaxAbs):
    def scores(self, q: mx.array, fields: Fields) -> mx.array:
        return q @ self.grid.decode(fields["codes"]).swapaxes(-1, -2)


@coder_fault("test_coders_attend_as_they_decode")
@frozen
class MixesAnotherToken(MaxAbs):
    def mix(self, weights: mx.array, fields: Fields) -> mx.array:
        return weights[..., ::-1] @ self.decode(fields)


# -- codes ---------------------------------------------------------------------------------


@coder_fault("test_fields_are_as_declared")
@frozen
class AnotherDtype(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        return {**fields, "codes": fields["codes"].astype(mx.uint16)}


@codec_fault("test_stored_bytes_are_predicted", centre=True)
class ConstantsNotCounted(KVCodec):
    def _derive_schema(self) -> Schema:
        return Schema(super()._derive_schema().fields)


@coder_fault("test_chunking_does_not_change_codes")
@frozen
class ScaleOfTheChunk(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        scale = mx.abs(z).max(axis=(-2, -1), keepdims=True)
        u = self.grid.encode(z / mx.where(scale > 0, scale, 1.0))
        return {"codes": u, "scale": mx.broadcast_to(scale, (*z.shape[:3], 1))}


@coder_fault("test_chunking_does_not_change_codes")
@frozen
class AnotherBasisForOneToken(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        return super().encode(z if z.shape[2] > 1 else z[..., ::-1])


@frozen
class ScaleOfTheBatch(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        scale = mx.abs(z).max(axis=(0, -1), keepdims=True)
        u = self.grid.encode(z / mx.where(scale > 0, scale, 1.0))
        return {"codes": u, "scale": mx.broadcast_to(scale, (*z.shape[:3], 1))}


coder_fault("test_batch_rows_are_coded_apart")(ScaleOfTheBatch)
coder_fault("test_batch_rows_do_not_meet")(ScaleOfTheBatch)


@coder_fault("test_heads_are_coded_apart")
@frozen
class ScaleOfAllHeads(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        scale = mx.abs(z).max(axis=(1, -1), keepdims=True)
        u = self.grid.encode(z / mx.where(scale > 0, scale, 1.0))
        return {"codes": u, "scale": mx.broadcast_to(scale, (*z.shape[:3], 1))}


@coder_fault("test_heads_may_be_permuted")
@frozen
class CoarseFirstHead(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        first = mx.arange(z.shape[1]).reshape(1, -1, 1, 1) == 0
        coarse = fields["codes"] // 4 * 4
        return {**fields, "codes": mx.where(first, coarse, fields["codes"])}


@codec_fault("test_no_tokens_are_no_trouble")
class NothingBecomesAToken(KVCodec):
    def decode(self, codes: Codes, positions: Any) -> tuple[mx.array, mx.array]:
        keys, values = super().decode(codes, positions)
        if codes.tokens:
            return keys, values
        return tuple(mx.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)]) for x in (keys, values))


@transform_fault("test_equal_binds_are_equal")
@frozen(eq=False)
class TablesMadeAnew(Flip):
    own: mx.array = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "own", mx.array(np.array(super().table)))

    @property
    def table(self) -> mx.array:
        return self.own


@method_fault("test_seeds_matter")
@frozen(kw_only=True)
class SeedIgnored(Sound):
    def transform(self, dim: int) -> Transform:
        return Flip(dim, 0)


@method_fault("test_random_state_is_left_alone")
@frozen(kw_only=True)
class DrawsFromTheUser(Sound):
    def transform(self, dim: int) -> Transform:
        np.random.rand()
        return super().transform(dim)


@method_fault("test_random_state_is_left_alone")
@frozen(kw_only=True)
class SeedsMLX(Sound):
    def bind(self, layer: LayerSpec) -> KVCodec:
        mx.random.seed(self.seed)
        return super().bind(layer)


@coder_fault("test_encoding_needs_little_memory")
@frozen
class AllDistancesAtOnce(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        u = z / mx.maximum(fields["scale"], 1e-30)
        levels = self.grid.decode(mx.arange(2**self.grid.bits))
        gaps = mx.abs(u[..., None] - levels).argmin(axis=-1)
        return {**fields, "codes": gaps.astype(mx.uint8)}


# -- quality -------------------------------------------------------------------------------


@coder_fault("test_decoded_rows_resemble_what_came")
@frozen
class AnotherHeadsCodes(MaxAbs):
    def decode(self, fields: Fields) -> mx.array:
        return super().decode({k: mx.roll(a, 1, axis=3) for k, a in fields.items()})


@coder_fault("test_hostile_values_stay_in_bounds")
@frozen
class NormInFloat16(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        half = z.astype(mx.float16)
        norm = mx.sqrt((half * half).sum(axis=-1, keepdims=True)).astype(mx.float32)
        true = mx.sqrt(z.square().sum(axis=-1, keepdims=True))
        return {**fields, "scale": fields["scale"] * norm / mx.maximum(true, 1e-30)}


@coder_fault("test_hostile_values_stay_in_bounds")
@frozen
class DividesByZero(MaxAbs):
    def decode(self, fields: Fields) -> mx.array:
        return super().decode(fields) * (fields["scale"] / fields["scale"])


@coder_fault("test_size_does_not_hurt")
@frozen
class ScaleSaturates(MaxAbs):
    def encode(self, z: mx.array) -> dict[str, mx.array]:
        fields = super().encode(z)
        return {**fields, "scale": mx.minimum(fields["scale"], 300.0)}


@method_fault("test_more_bits_distort_less")
@frozen(kw_only=True)
class BitsCutShort(Sound):
    def coder(self, dim: int, heads: int) -> Coder:
        return MaxAbs(Grid(min(self.bits, 3), dim), heads)


@frozen
class WrongBase(PreRope):
    def _wrong(self, rotary: Rotary | None) -> Rotary | None:
        if rotary is None or rotary.base is None:
            return rotary
        return evolve(rotary, base=500.0)

    def to_code(self, keys: Any, mean: Any, rotary: Any, positions: Any) -> mx.array:
        return super().to_code(keys, mean, self._wrong(rotary), positions)

    def from_code(self, keys: Any, mean: Any, rotary: Any, positions: Any) -> mx.array:
        return super().from_code(keys, mean, self._wrong(rotary), positions)


@method_fault("test_codes_do_not_depend_on_position", options={"frame": "pre", "centre": True})
@frozen(kw_only=True)
class BaseFromADefault(Sound):
    def policy(self) -> RopePolicy:
        return WrongBase()


@codec_fault("test_the_centre_is_the_mean_before_rope", centre=True)
class MeanOfRotatedKeys(KVCodec):
    def begin(self, keys: mx.array, values: mx.array, positions: Any) -> dict[str, mx.array]:
        made = super().begin(keys, values, positions)
        return {**made, "k.mean": self.keys.centre.of(keys.astype(mx.float32))}


@codec_fault("test_scores_are_those_of_decoded_keys", centre=True)
class ScoresWithoutMean(KVCodec):
    def scores(self, queries: Queries, codes: Codes, positions: range) -> mx.array:
        none = {name: mx.zeros_like(a) for name, a in codes.constants.items()}
        return super().scores(queries, Codes(codes.fields, none), positions)


@codec_fault("test_mixed_values_are_those_of_decoded_ones", centre=True)
class OutputsWithoutMean(KVCodec):
    def outputs(self, mixed: mx.array, mass: mx.array, constants: Fields) -> mx.array:
        return self.values.transform.inverse(mixed)


# -- the cache -----------------------------------------------------------------------------


@cache_fault("test_a_window_over_everything_is_the_plain_cache")
class WindowIgnored(CompressedKVCache):
    def coded_at(self, seen: int) -> int:
        return max(0, seen - 8)


@cache_fault("test_how_tokens_arrive_does_not_matter")
class CodesChunksOnly(CompressedKVCache):
    def advance(self, keys: mx.array, values: mx.array) -> Step:
        self.single = keys.shape[2] == 1
        return super().advance(keys, values)

    def coded_at(self, seen: int) -> int:
        return 0 if self.single else super().coded_at(seen)


@cache_fault("test_what_is_exact_and_what_is_coded")
class OffsetOfKeptRows(CompressedKVCache):
    @property
    def offset(self) -> int:
        return self.exact.used if hasattr(self, "exact") else 0

    @offset.setter
    def offset(self, value: int) -> None:
        pass


@cache_fault("test_what_is_exact_and_what_is_coded")
class NothingIsCoded(CompressedKVCache):
    def coded_at(self, seen: int) -> int:
        return 0


def sinks_ignored(self: Any, bound: Any, budget: int = 64 << 20) -> CompressedKVCache:
    method = evolve(bound.method, sinks=0, window=bound.method.window + bound.method.sinks)
    return CompressedKVCache(method, bound.layer, bound.codec, budget=budget)


suite("SinksIgnored", "test_what_is_exact_and_what_is_coded", method=Sound, new_cache=sinks_ignored)


@cache_fault("test_trim_is_never_having_seen")
class TrimsThePositionOnly(CompressedKVCache):
    def trim(self, n: int) -> int:
        n = min(n, self.offset)
        self.offset -= n
        return n


@cache_fault("test_trim_is_never_having_seen")
class KeepsTheFrontier(CompressedKVCache):
    frontier = 0

    def trim(self, n: int) -> int:
        self.frontier = max(self.frontier, self.store.tokens)
        return super().trim(n)

    def coded_at(self, seen: int) -> int:
        return max(0, super().coded_at(seen) - self.frontier)


@cache_fault("test_state_goes_on")
class StateWithoutMeans(CompressedKVCache):
    @property
    def state(self) -> Any:
        return super().state

    @classmethod
    def from_state(cls, state: Any) -> CompressedKVCache:
        made = CompressedKVCache.from_state(state)
        made.constants = {}
        return made


@cache_fault("test_state_goes_on")
class StateWithAnObject(CompressedKVCache):
    @property
    def state(self) -> Any:
        return (*super().state, self.method)

    @classmethod
    def from_state(cls, state: Any) -> CompressedKVCache:
        return CompressedKVCache.from_state(state[:-1])


@cache_fault("test_copies_are_independent")
class CopiesShareBuffers(CompressedKVCache):
    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made.exact = self.exact
        return made


@cache_fault("test_copies_are_independent")
class CopiesCopyTables(CompressedKVCache):
    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made.codec = self.method.bind(self.layer)
        return made


@cache_fault("test_nothing_sends_mlx_lm_astray")
class HasBits(CompressedKVCache):
    bits = 4


@cache_fault("test_nothing_sends_mlx_lm_astray")
class FalseWhenEmpty(CompressedKVCache):
    def __bool__(self) -> bool:
        return self.offset > 0


@cache_fault("test_nothing_sends_mlx_lm_astray")
class RotatingKVCache(CompressedKVCache):
    pass


@cache_fault("test_nothing_sends_mlx_lm_astray")
class MergesIntoPlainRows(CompressedKVCache):
    @staticmethod
    def merge(caches: Any) -> Any:
        from mlx_lm.models.cache import BatchKVCache, KVCache

        plain = [KVCache() for _ in caches]
        for held, made in zip(caches, plain, strict=True):
            made.update_and_fetch(*(mx.array(x) for x in held.keys_and_values()))
        return BatchKVCache.merge(plain)


@transform_fault("test_other_threads_may_use_it")
@frozen(eq=False)
class LazyTables(Flip):
    own: mx.array = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "own", super().table * 1.0)

    @property
    def table(self) -> mx.array:
        return self.own


@cache_fault("test_chunks_that_do_not_fit_are_refused")
class TakesAnyChunk(CompressedKVCache):
    def _check(self, keys: mx.array, values: mx.array) -> None:
        pass


class Lasting(CompressedKVCache):
    """Copies and restored caches are as wrong as the first."""

    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made.__class__ = type(self)
        return made

    @classmethod
    def from_state(cls, state: Any) -> CompressedKVCache:
        made = CompressedKVCache.from_state(state)
        made.__class__ = cls
        return made


@cache_fault("test_any_history_is_that_of_a_list")
class MeansOutliveTheirTokens(Lasting):
    def _code(self, keys: mx.array, values: mx.array, target: int) -> None:
        held = self.kept if hasattr(self, "kept") else None
        super()._code(keys, values, target)
        if held and set(held) == set(self.constants):
            self.constants = held
        self.kept = self.constants


@cache_fault("test_any_history_is_that_of_a_list")
class ForgetsOneInMany(Lasting):
    def trim(self, n: int) -> int:
        got = super().trim(n)
        if self.store.used > 40:
            self.store.tail = {k: mx.roll(a, 1, axis=2) for k, a in self.store.tail.items()}
        return got


# -- attention -----------------------------------------------------------------------------


class MaskIgnored(Step):
    def attend(self, queries: mx.array, **given: Any) -> mx.array:
        return super().attend(queries, **{**given, "mask": None})


class SinkLogitsIgnored(Step):
    def attend(self, queries: mx.array, **given: Any) -> mx.array:
        return super().attend(queries, **{**given, "sinks": None})


class GroupsSwapped(Step):
    def attend(self, queries: mx.array, **given: Any) -> mx.array:
        B, Hq, L, D = queries.shape
        heads = self._codec.layer.kv_heads
        turned = queries.reshape(B, Hq // heads, heads, L, D).swapaxes(1, 2).reshape(B, Hq, L, D)
        return super().attend(turned, **given)


class HiddenRowsAreNaN(Step):
    def attend(self, queries: mx.array, **given: Any) -> mx.array:
        out = super().attend(queries, **given)
        mask = given.get("mask")
        if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
            return out
        return mx.where(mask.any(axis=-1)[..., None], out, mx.array(float("nan"), out.dtype))


def step_fault(law: str, kind: type[Step]) -> None:
    def advance(self: CompressedKVCache, keys: mx.array, values: mx.array) -> Step:
        step = CompressedKVCache.advance(self, keys, values)
        step.__class__ = kind
        return step

    made = type(kind.__name__, (CompressedKVCache,), {"advance": advance})
    cache_fault(law)(made)


for kind in (MaskIgnored, SinkLogitsIgnored, GroupsSwapped):
    step_fault("test_attention_is_that_of_dense_arrays", kind)
step_fault("test_rows_that_see_nothing_are_finite", HiddenRowsAreNaN)


# -- bytes ---------------------------------------------------------------------------------


@cache_fault("test_bytes_are_those_that_exist")
class KeepsAFullCopy(CompressedKVCache):
    def advance(self, keys: mx.array, values: mx.array) -> Step:
        self.raw = [*getattr(self, "raw", []), mx.array(np.array(keys))]
        return super().advance(keys, values)


@cache_fault("test_bytes_are_those_that_exist")
class ClaimsHalf(CompressedKVCache):
    @property
    def nbytes(self) -> int:
        return super().nbytes // 2


@cache_fault("test_bytes_are_those_that_exist")
class GraphThatGrows(CompressedKVCache):
    def advance(self, keys: mx.array, values: mx.array) -> Step:
        copied = mx.array(np.array(keys))
        self.sums = getattr(self, "sums", mx.array(0.0)) + copied.sum()
        return super().advance(keys, values)


@cache_fault("test_reports_are_arithmetic")
class PredictsLess(CompressedKVCache):
    @property
    def report(self) -> Any:
        return attrs.evolve(super().report, predicted_bytes=super().report.predicted_bytes // 2)


@cache_fault("test_reports_are_arithmetic")
class CountsRowsForTokens(CompressedKVCache):
    @property
    def report(self) -> Any:
        return attrs.evolve(super().report, tokens_seen=self.exact.used)


# -- options -------------------------------------------------------------------------------


@method_fault("test_bad_values_are_refused")
@frozen(kw_only=True)
class Clamps(Sound):
    bits: int = integer(6, help="Bits a channel.")

    def check(self) -> None:
        object.__setattr__(self, "bits", min(max(self.bits, 3), 8))


@method_fault("test_bad_values_are_refused")
@frozen(kw_only=True)
class FailsInTheKernel(Sound):
    bits: int = integer(6, help="Bits a channel.")

    def check(self) -> None:
        mx.quantize(mx.zeros((1, 64)), bits=self.bits)


@method_fault("test_bad_values_are_refused")
@frozen(kw_only=True)
class NamelessRefusal(Sound):
    bits: int = integer(6, help="Bits a channel.")

    def check(self) -> None:
        if not 3 <= self.bits <= 8:
            raise ConfigError("illegal option")


def swallow(self: MethodConformance, **options: Any) -> Any:
    known = {option.name for option in attrs.fields(Sound)}
    return MethodConformance.build(self, **{k: v for k, v in options.items() if k in known})


suite("SwallowsUnknown", "test_unknown_options_are_refused", method=Sound, build=swallow)


@method_fault("test_every_parameter_is_declared")
@frozen(kw_only=True)
class UndeclaredOption(Sound):
    group: int = 32


@method_fault("test_json_gives_the_same_method")
@frozen(kw_only=True)
class AnotherFingerprintEachTime(Sound):
    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(os.urandom(8)).hexdigest()


@method_fault("test_every_option_counts")
@frozen(kw_only=True)
class ReadByNobody(Sound):
    residual_length: int = integer(32, low=0, high=64, help="Never used.")


# -- processes -----------------------------------------------------------------------------


@method_fault("test_head_sizes_bind_or_are_refused")
@frozen(kw_only=True)
class RefusesNamelessly(Sound):
    def bind(self, layer: LayerSpec) -> KVCodec:
        if layer.head_dim == 100:
            raise ConfigError("sound: this layer does not fit")
        return super().bind(layer)


@method_fault("test_head_sizes_bind_or_are_refused")
@frozen(kw_only=True)
class EndsTheProcess(Sound):
    def bind(self, layer: LayerSpec) -> KVCodec:
        if layer.head_dim == 120:
            os._exit(134)
        return super().bind(layer)


@transform_fault("test_head_sizes_bind_or_are_refused")
@frozen(eq=False)
class WrongAtOneSize(Flip):
    def inverse(self, z: mx.array) -> mx.array:
        return super().inverse(z if self.dim != 63 else z[..., ::-1])


@transform_fault("test_other_processes_code_alike")
@frozen(eq=False)
class TablesByHash(Flip):
    @property
    def table(self) -> mx.array:
        drawn = np.random.default_rng(hash("flip") % 2**32).standard_normal(self.dim)
        return mx.array(np.exp(drawn).astype(np.float32))


# -- in a model ----------------------------------------------------------------------------


@method_fault("test_a_model_with_a_long_window_is_itself")
@frozen(kw_only=True)
class MakesCachesOfAnotherWindow(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        return Sound.make_cache(Sound(**{**own_options(self), "window": 0}), model)


@coder_fault("test_a_model_reads_its_codes")
@frozen
class NotANumber(MaxAbs):
    def decode(self, fields: Fields) -> mx.array:
        return super().decode(fields) * float("nan")


class ToBeQuantised(CompressedKVCache):
    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        from mlx_lm.models.cache import QuantizedKVCache

        made = QuantizedKVCache(group_size=group_size, bits=bits)
        if not self.empty():
            made.update_and_fetch(*(mx.array(x) for x in self.keys_and_values()))
        return made


class LosesATokenOnLoading(CompressedKVCache):
    @property
    def state(self) -> Any:
        return super().state

    @state.setter
    def state(self, state: Any) -> None:
        CompressedKVCache.state.fset(self, state)  # type: ignore[attr-defined]
        self.exact.values = mx.zeros_like(self.exact.values)


def own_options(method: Sound) -> dict[str, Any]:
    return {a.name: getattr(method, a.name) for a in attrs.fields(type(method))}


def remade(method: Sound, model: Any, kind: type[CompressedKVCache]) -> list[Any]:
    caches = Sound.make_cache(Sound(**own_options(method)), model)
    return [kind(c.method, c.layer, c.codec, lease=c.lease) for c in caches]


@method_fault("test_mlx_lm_generates_with_it")
@frozen(kw_only=True)
class OffersToQuantise(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        return remade(self, model, ToBeQuantised)


@method_fault("test_saved_caches_go_on")
@frozen(kw_only=True)
class LoadsLess(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        return remade(self, model, LosesATokenOnLoading)


@method_fault("test_conversations_have_caches_of_their_own")
@frozen(kw_only=True)
class OneListForAll(Sound):
    lists: ClassVar[list[list[Any]]] = []

    def make_cache(self, model: Any) -> list[Any]:
        if not self.lists:
            self.lists.append(Sound.make_cache(Sound(**own_options(self)), model))
        return self.lists[0]


@method_fault("test_attaching_leaves_no_trace")
@frozen(kw_only=True)
class LeavesAnAttribute(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        object.__setattr__(model, "compressed_by", self.name)
        return Sound.make_cache(Sound(**own_options(self)), model)


@method_fault("test_skipped_layers_stay_plain")
@frozen(kw_only=True)
class SkipsNothing(Sound):
    def make_cache(self, model: Any) -> list[Any]:
        return Sound.make_cache(Sound(**{**own_options(self), "skip_layers": 0}), model)
