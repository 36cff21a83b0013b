"""The bytes of a cache before there is one, by arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from kvcompress.compare.report import one_line
from kvcompress.errors import CalibrationRequired, ConfigError

if TYPE_CHECKING:
    from kvcompress.cache.kvcache import CompressedKVCache
    from kvcompress.method import CompressionMethod

MOST_TOKENS: Final = 1 << 24
"""Where the search for the largest context ends."""


@frozen
class Estimate:
    """What a sequence of ``context`` tokens takes.

    Attributes:
        context: Tokens.
        key_bytes: Codes and side information of coded tokens' keys.
        value_bytes: The same of their values.
        exact_bytes: First and last tokens of compressed layers, kept as they came.
        plain_bytes: Layers that are left as the model made them.
        table_bytes: Tables that all sequences share.
        fp16_bytes: What the model's own caches would take in float16.
    """

    context: int
    key_bytes: int
    value_bytes: int
    exact_bytes: int
    plain_bytes: int
    table_bytes: int
    fp16_bytes: int

    @property
    def sequence_bytes(self) -> int:
        """All that one sequence keeps."""
        return self.key_bytes + self.value_bytes + self.exact_bytes + self.plain_bytes

    @property
    def total_bytes(self) -> int:
        """One sequence and the tables."""
        return self.sequence_bytes + self.table_bytes

    @property
    def times_smaller(self) -> float:
        """The float16 cache over one sequence."""
        return self.fp16_bytes / self.sequence_bytes


class Estimator:
    """The arithmetic of one method on one model.

    Args:
        method: The method.
        model: An mlx-lm model; its weights may be missing.

    Raises:
        KVCompressError: The method cannot serve the model.
    """

    def __init__(self, method: CompressionMethod, model: Any) -> None:
        from kvcompress.cache.accounting import shared_table_bytes
        from kvcompress.cache.kvcache import CompressedKVCache
        from kvcompress.cache.nested import leaves

        self._method = method
        self._model = model
        caches = leaves(method.make_cache(model))
        self._ours = [cache for cache in caches if isinstance(cache, CompressedKVCache)]
        self._has_plain = len(self._ours) < len(caches)
        self._table_bytes = shared_table_bytes([cache.codec for cache in self._ours])

    def at(self, context: int) -> Estimate:
        """What a sequence of ``context`` tokens takes.

        Raises:
            ConfigError: ``context`` is less than 1.
        """
        from kvcompress.compare.memory import plain_values

        if context < 1:
            raise ConfigError(f"estimate: --context must be at least 1 (got {context})")
        return Estimate(
            context=context,
            key_bytes=sum(_coded_bytes(cache, context, "k.") for cache in self._ours),
            value_bytes=sum(_coded_bytes(cache, context, "v.") for cache in self._ours),
            exact_bytes=sum(_exact_bytes(cache, context) for cache in self._ours),
            plain_bytes=self._plain_bytes(context),
            table_bytes=self._table_bytes,
            fp16_bytes=2 * plain_values(self._model, context),
        )

    def largest_context(self, memory: int) -> int:
        """The longest sequence whose cache and tables fit into ``memory`` bytes.

        Exact to within a block: coding a block frees a little.

        Returns:
            Tokens; 0 where not even one fits, at most :data:`MOST_TOKENS`.
        """
        low, high = 0, MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self._total_bytes(middle) <= memory:
                low = middle
            else:
                high = middle - 1
        return low

    def _total_bytes(self, context: int) -> int:
        from kvcompress.cache.accounting import predict_bytes

        coded = [(cache, cache.coded_at(context)) for cache in self._ours]
        compressed = sum(
            predict_bytes(cache.layer, cache.codec.schema, tokens, context - tokens)
            for cache, tokens in coded
        )
        return compressed + self._plain_bytes(context) + self._table_bytes

    def _plain_bytes(self, context: int) -> int:
        """What the caches that are not ours hold, from the shapes of an unevaluated run."""
        if not self._has_plain:
            return 0
        from mlx_lm.models.cache import make_prompt_cache

        from kvcompress.cache.kvcache import CompressedKVCache
        from kvcompress.cache.nested import leaves, with_leaves
        from kvcompress.compare.memory import feed_unevaluated, held

        caches = self._method.make_cache(self._model)
        every, own = leaves(caches), leaves(make_prompt_cache(self._model))
        others = [cache for cache in every if not isinstance(cache, CompressedKVCache)]
        pairs = zip(every, own, strict=True)
        mixed = (plain if isinstance(c, CompressedKVCache) else c for c, plain in pairs)
        feed_unevaluated(self._model, with_leaves(caches, mixed), context)
        return sum(int(array.nbytes) for array in held(others))


def estimator_of(words: str, model: Any, calibration: str | None = None) -> Estimator:
    """The arithmetic of a method by its words; without its calibration where that can be.

    Bytes depend on the tables' sizes alone, which are the same whatever they are fitted to: a
    method that lacks its calibration is bound to tables that it fits to made-up tokens.

    Args:
        words: A method with its options.
        model: An mlx-lm model; its weights may be missing.
        calibration: Path of a calibration file, for a method that takes one.

    Raises:
        ConfigError: The method fits no tables to made-up tokens.
        KVCompressError: As :class:`Estimator`.
    """
    from kvcompress.compare.methods import method_of
    from kvcompress.compare.sized import sized_calibration

    method = method_of(words, calibration)
    try:
        return Estimator(method, model)
    except CalibrationRequired:
        if getattr(method, "calibration", None) is not None:
            raise
    try:
        return Estimator(method_of(words, sized_calibration(method, model)), model)
    except Exception as error:  # a plugin's fit may raise anything
        raise ConfigError(
            f"estimate: the bytes of {words} are not known before it is calibrated "
            f"({one_line(error)}); make a calibration with kvcompress calibrate, and give it with "
            f"--calibration"
        ) from error


def _coded_bytes(cache: CompressedKVCache, context: int, part: str) -> int:
    coded, schema = cache.coded_at(context), cache.codec.schema
    once = sum(f.bytes_per_token for f in schema.constants if f.name.startswith(part))
    return coded * schema.part_bytes(part) + (once if coded else 0)


def _exact_bytes(cache: CompressedKVCache, context: int) -> int:
    from kvcompress.cache.accounting import predict_bytes

    return predict_bytes(cache.layer, cache.codec.schema, 0, context - cache.coded_at(context))
