"""The codec of one layer: two pipelines of stages, and attention that reads their codes."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec, Positions, Rotary
from kvcompress.schema import Field, Schema
from kvcompress.stages.base import Careful, CarefulCoder, Coder, Fields, Transform
from kvcompress.stages.centre import Centre, no_centre
from kvcompress.stages.rope import PostRope, Queries, RopePolicy

_CONSTANT_DTYPE = "float32"
_RECEIVED_BYTES = 4  # a float32 a token


@frozen(eq=False)
class Pipeline:
    """``centre -> transform -> coder`` for the keys or the values of a layer.

    Attributes:
        transform: Maps the channels.
        coder: Codes what it gives.
        centre: Is taken out before both.
        careful: The coder, where it has a careful assignment and a plain one.
    """

    transform: Transform
    coder: Coder
    centre: Centre = field(factory=no_centre)
    careful: CarefulCoder | None = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        two = isinstance(self.coder, CarefulCoder) and self.coder.assignments > 1
        object.__setattr__(self, "careful", self.coder if two else None)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that all sequences share."""
        return self.transform.table_bytes + self.coder.table_bytes + self.centre.table_bytes

    def encode(self, x: mx.array, careful: Careful = True) -> dict[str, mx.array]:
        """Centred vectors ``(B, H, T, D)`` float32 to stored fields.

        Args:
            x: The vectors.
            careful: The tokens for the careful assignment, where the coder has two.
        """
        z, coder = self.transform.forward(x), self.careful
        return self.coder.encode(z) if coder is None else coder.encode(z, careful)

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields to centred vectors ``(B, H, T, D)`` float32."""
        return self.transform.inverse(self.coder.decode(fields))


@frozen(eq=False)
class Codes:
    """Coded tokens: one array a field of the schema, and what the sequence keeps once.

    Attributes:
        fields: ``(B, heads, T, width)`` each, named as in the schema.
        constants: ``(B, heads, 1, width)`` each; empty for most codecs.
    """

    fields: dict[str, mx.array]
    constants: dict[str, mx.array]

    @property
    def tokens(self) -> int:
        """Number of coded tokens."""
        return int(next(iter(self.fields.values())).shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(a.nbytes) for a in (*self.fields.values(), *self.constants.values()))


@frozen(eq=False)
class KVCodec:
    """Encodes, decodes and attends for one layer. Pure: no state, the same result every time.

    The centre of the keys lives before RoPE, where it is constant.

    Attributes:
        layer: The layer it was bound to.
        keys: The key pipeline.
        values: The value pipeline.
        rope: The frame in which keys are coded, and how queries meet them.
        attend_fraction: How much of the coded tokens a step of few queries reads, above 0; 1 reads
            all (:mod:`kvcompress.attention.selection`).
        careful_fraction: For how many of the tokens that a cache codes it asks for the careful
            assignment, where the key coder has two: those that were attended to most
            (:mod:`kvcompress.cache.received`).
        schema: What is stored, derived from the pipelines.
    """

    layer: LayerSpec
    keys: Pipeline
    values: Pipeline
    rope: RopePolicy = field(factory=PostRope)
    attend_fraction: float = 1.0
    careful_fraction: float = 1.0
    schema: Schema = field(init=False)

    def __attrs_post_init__(self) -> None:
        layer = self.layer
        if not 0 < self.attend_fraction <= 1:
            raise ConfigError(
                f"codec: attend_fraction must be above 0 and at most 1 (got {self.attend_fraction})"
            )
        if not 0 <= self.careful_fraction <= 1:
            raise ConfigError(
                f"codec: careful_fraction must be from 0 to 1 (got {self.careful_fraction})"
            )
        for name, pipeline, dim in (
            ("keys", self.keys, layer.head_dim),
            ("values", self.values, layer.value_dim),
        ):
            if pipeline.transform.dim != dim:
                raise ConfigError(
                    f"codec: the {name}' transform must take {dim} channels to fit layer "
                    f"{layer.index} (got {pipeline.transform.dim})"
                )
            _check_heads(f"the {name} of layer {layer.index}", pipeline, layer.kv_heads, dim)
        object.__setattr__(self, "schema", self._derive_schema())

    def _derive_schema(self) -> Schema:
        fields: list[Field] = []
        constants: list[Field] = []
        for prefix, pipeline, dim in (
            ("k.", self.keys, self.layer.head_dim),
            ("v.", self.values, self.layer.value_dim),
        ):
            fields += [
                Field(prefix + f.name, f.dtype, f.width, f.heads, f.payload_bits)
                for f in pipeline.coder.fields
            ]
            if pipeline.centre.tokens:
                constants.append(Field(prefix + "mean", _CONSTANT_DTYPE, dim, self.layer.kv_heads))
        return Schema(tuple(fields), tuple(constants), _RECEIVED_BYTES if self.chooses else 0)

    @property
    def chooses(self) -> bool:
        """Whether some tokens are to get the careful assignment and some not."""
        return 0 < self.careful_fraction < 1 and self.keys.careful is not None

    @property
    def table_bytes(self) -> int:
        """Bytes of codebooks, rotations and means that all sequences share."""
        return self.keys.table_bytes + self.values.table_bytes

    @property
    def warmup(self) -> int:
        """Tokens that must be there before the first can be coded."""
        return max(self.keys.centre.tokens, self.values.centre.tokens)

    @property
    def _rotary(self) -> Rotary | None:
        return self.layer.rotary

    def begin(self, keys: mx.array, values: mx.array, positions: Positions) -> dict[str, mx.array]:
        """What a sequence keeps once, from its first tokens to be coded.

        Args:
            keys: ``(B, Hkv, T, D)`` post-RoPE; the first :attr:`warmup` tokens count.
            values: ``(B, Hkv, T, Dv)``.
            positions: The tokens' positions.

        Returns:
            One ``(B, Hkv, 1, width)`` array a constant of the schema.
        """
        constants: dict[str, mx.array] = {}
        if self.keys.centre.tokens:
            plain = keys.astype(mx.float32)
            if self._rotary is not None:
                plain = self._rotary.unrotate(plain, positions)
            constants["k.mean"] = self.keys.centre.of(plain)
        if self.values.centre.tokens:
            constants["v.mean"] = self.values.centre.of(values.astype(mx.float32))
        return constants

    def _mean(self, part: Literal["k.", "v."], constants: Fields) -> mx.array | None:
        pipeline = self.keys if part == "k." else self.values
        if pipeline.centre.row is not None:
            return pipeline.centre.row
        return constants[part + "mean"] if pipeline.centre.tokens else None

    def encode(
        self,
        keys: mx.array,
        values: mx.array,
        positions: Positions,
        constants: Fields | None = None,
        careful: mx.array | None = None,
    ) -> Codes:
        """Code tokens.

        Args:
            keys: ``(B, Hkv, T, D)`` post-RoPE, any float dtype.
            values: ``(B, Hkv, T, Dv)``.
            positions: The ``T`` positions of the tokens.
            constants: What :meth:`begin` gave for the sequence; ``None`` takes these tokens as
                the sequence's first.
            careful: ``(B, T)`` bool, the tokens that get the careful assignment; ``None`` for all,
                or for none where :attr:`careful_fraction` is 0.

        Returns:
            The codes, lazily.
        """
        if not keys.shape[2]:  # MLX's kernels refuse arrays without entries
            batch = keys.shape[0]
            empty = {f.name: f.allocate(batch, 0) for f in self.schema.fields}
            return Codes(empty, dict(constants or {}))
        if constants is None:
            constants = self.begin(keys, values, positions)
        marks: Careful = self.careful_fraction > 0 if careful is None else careful
        coded_keys = self.keys.encode(self._plain_keys(keys, positions, constants), marks)
        mean = self._mean("v.", constants)
        centred = values.astype(mx.float32)
        coded_values = self.values.encode(centred if mean is None else centred - mean, marks)
        fields = {f"k.{name}": array for name, array in coded_keys.items()}
        fields |= {f"v.{name}": array for name, array in coded_values.items()}
        return Codes(fields, dict(constants))

    def _plain_keys(self, keys: mx.array, positions: Positions, constants: Fields) -> mx.array:
        mean = self._mean("k.", constants)
        return self.rope.to_code(keys.astype(mx.float32), mean, self._rotary, positions)

    def importance(self, keys: mx.array, positions: Positions, constants: Fields) -> mx.array:
        """How much each token's key is worth care, for want of its queries: ``(B, T)`` float32.

        Args:
            keys: ``(B, Hkv, T, D)`` post-RoPE.
            positions: The tokens' positions.
            constants: The sequence's.

        Raises:
            ConfigError: The key coder has one assignment only.
        """
        coder = self.keys.careful
        if coder is None:
            raise ConfigError("codec: importance needs a key coder with two assignments")
        plain = self._plain_keys(keys, positions, constants)
        return coder.importance(self.keys.transform.forward(plain))

    def decode(self, codes: Codes, positions: Positions) -> tuple[mx.array, mx.array]:
        """Keys ``(B, Hkv, T, D)``, rotated as they came, and values ``(B, Hkv, T, Dv)``.

        Both in the layer's dtype; what lies outside its range is rounded to its last number.
        """
        if not codes.tokens:
            layer, batch = self.layer, next(iter(codes.fields.values())).shape[0]
            dims = (layer.head_dim, layer.value_dim)
            none = [mx.zeros((batch, layer.kv_heads, 0, dim), layer.mx_dtype) for dim in dims]
            return none[0], none[1]
        mean = self._mean("k.", codes.constants)
        plain = self.keys.decode(_part(codes.fields, "k."))
        keys = self.rope.from_code(plain, mean, self._rotary, positions)
        mean = self._mean("v.", codes.constants)
        values = self.values.decode(_part(codes.fields, "v."))
        values = values if mean is None else values + mean
        return _narrow(keys, self.layer.mx_dtype), _narrow(values, self.layer.mx_dtype)

    def queries(self, q: mx.array, positions: range) -> Queries:
        """Make a step's queries ready.

        Args:
            q: ``(B, Hkv, M, D)`` float32, post-RoPE and scaled; ``M = G * L``, positions fastest.
            positions: The ``L`` positions.
        """
        return self.rope.queries(q, self.keys.transform, self._rotary, positions)

    def scores(self, queries: Queries, codes: Codes, positions: range) -> mx.array:
        """``q . k`` of all rows against coded tokens: ``(B, Hkv, M, T)`` float32."""
        return self.rope.scores(
            queries,
            _part(codes.fields, "k."),
            self._mean("k.", codes.constants),
            positions,
            coder=self.keys.coder,
            transform=self.keys.transform,
            rotary=self._rotary,
        )

    def mix(self, weights: mx.array, codes: Codes) -> mx.array:
        """Weighted sum of coded values in code space: ``(B, Hkv, M, T)`` to ``(B, Hkv, M, Dv)``."""
        return self.values.coder.mix(weights, _part(codes.fields, "v."))

    def outputs(self, mixed: mx.array, mass: mx.array, constants: Fields) -> mx.array:
        """Sums of :meth:`mix` back to value space, once a step.

        Args:
            mixed: ``(B, Hkv, M, Dv)`` float32.
            mass: ``(B, Hkv, M, 1)``, the weight that went into ``mixed``.
            constants: The sequence's.
        """
        out = self.values.transform.inverse(mixed)
        mean = self._mean("v.", constants)
        return out if mean is None else out + mass * mean


def _check_heads(where: str, pipeline: Pipeline, heads: int, dim: int) -> None:
    """Lead a token through a pipeline, uncomputed: tables may be for another number of heads.

    Raises:
        ConfigError: They are.
    """
    token, mean = mx.zeros((1, heads, 1, dim)), pipeline.centre.mean
    cause: ValueError | None = None
    try:
        fits = pipeline.decode(pipeline.encode(token)).shape == token.shape
    except ValueError as error:  # MLX's, of shapes that do not broadcast
        fits, cause = False, error
    if not fits or (mean is not None and mean.shape not in ((heads, dim), (1, dim))):
        raise ConfigError(
            f"codec: the stages for {where} must take {heads} heads of {dim} channels; their "
            f"tables are for others"
        ) from cause


def _part(fields: Fields, prefix: str) -> dict[str, mx.array]:
    return {k[len(prefix) :]: a for k, a in fields.items() if k.startswith(prefix)}


def _narrow(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast down without making infinities of finite numbers."""
    if dtype == mx.float32:
        return x
    limit = mx.finfo(dtype).max
    return mx.clip(x, -limit, limit).astype(dtype)
