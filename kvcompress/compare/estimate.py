"""The bytes of a cache before there is one, by arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from kvcompress.errors import ConfigError

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


def estimator(method: CompressionMethod, model: Any) -> Callable[[int], Estimate]:
    """Bind a method to a model, whose weights may be missing, and return the arithmetic.

    Raises:
        KVCompressError: The method cannot serve the model.
    """
    from kvcompress.cache.accounting import shared_table_bytes
    from kvcompress.cache.kvcache import CompressedKVCache
    from kvcompress.compare.memory import plain_values

    caches = method.make_cache(model)
    ours = [cache for cache in caches if isinstance(cache, CompressedKVCache)]
    tables = shared_table_bytes([cache.codec for cache in ours])
    has_plain = len(ours) < len(caches)

    def at(context: int) -> Estimate:
        if context < 1:
            raise ConfigError(f"estimate: context must be at least 1 (got {context})")
        return Estimate(
            context=context,
            key_bytes=sum(_coded_bytes(cache, context, "k.") for cache in ours),
            value_bytes=sum(_coded_bytes(cache, context, "v.") for cache in ours),
            exact_bytes=sum(_exact_bytes(cache, context) for cache in ours),
            plain_bytes=_plain_bytes(method.make_cache(model), model, context) if has_plain else 0,
            table_bytes=tables,
            fp16_bytes=2 * plain_values(model, context),
        )

    return at


def largest_context(at: Callable[[int], Estimate], memory: int) -> int:
    """The longest sequence whose cache and tables fit into ``memory`` bytes.

    Exact to within a block: coding a block frees a little.

    Returns:
        Tokens; 0 where not even one fits, at most :data:`MOST_TOKENS`.
    """
    low, high = 0, MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if at(middle).total_bytes <= memory:
            low = middle
        else:
            high = middle - 1
    return low


def _coded_bytes(cache: CompressedKVCache, context: int, part: str) -> int:
    coded, schema = cache.coded_at(context), cache.codec.schema
    once = sum(f.bytes_per_token for f in schema.constants if f.name.startswith(part))
    return coded * schema.part_bytes(part) + (once if coded else 0)


def _exact_bytes(cache: CompressedKVCache, context: int) -> int:
    from kvcompress.cache.accounting import predict_bytes

    return predict_bytes(cache.layer, cache.codec.schema, 0, context - cache.coded_at(context))


def _plain_bytes(caches: Sequence[Any], model: Any, context: int) -> int:
    """What the entries that are not ours hold, from the shapes of an unevaluated run."""
    from mlx_lm.models.cache import make_prompt_cache

    from kvcompress.cache.kvcache import CompressedKVCache
    from kvcompress.compare.memory import feed_unevaluated, held

    own = make_prompt_cache(model)
    mixed = [
        plain if isinstance(cache, CompressedKVCache) else cache
        for cache, plain in zip(caches, own, strict=True)
    ]
    feed_unevaluated(model, mixed, context)
    others = [c for c, plain in zip(mixed, own, strict=True) if c is not plain]
    return sum(int(array.nbytes) for array in held(others))
