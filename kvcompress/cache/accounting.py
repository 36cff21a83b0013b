"""The bytes of a cache: predicted by arithmetic, and counted from the arrays that exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from kvcompress.cache.binding import check_caches
from kvcompress.cache.nested import leaves
from kvcompress.layers import LayerSpec
from kvcompress.schema import Schema

if TYPE_CHECKING:
    from kvcompress.cache.kvcache import CompressedKVCache

_FP16 = 2  # bytes a value of the yardstick


@frozen
class LayerReport:
    """What one layer's cache holds. Bytes count the whole batch.

    Attributes:
        tokens_seen: Tokens given to the cache and not trimmed.
        tokens_exact: Of these, kept as they came.
        tokens_retrieved: Of the coded ones, those that got the more careful of two assignments.
        compressed_key_bytes: Codes and side information of the coded tokens' keys.
        compressed_value_bytes: The same of their values.
        fp16_key_bytes: What the coded tokens' keys would take in float16.
        fp16_value_bytes: The same of their values.
        codebook_bytes: Tables shared by all sequences of the method: those of the layer's keys and
            those of its values; over all layers, each table once.
        payload_bits: Code bits of the coded tokens, all heads, without side information.
        values: Numbers that the cache stands for, keys and values of all tokens.
        coded_values: The same of the coded tokens.
        predicted_bytes: Bytes of the tokens held, from the schema alone.
        resident_bytes: Bytes of the arrays that exist.
        reserved_bytes: Of these, room for tokens to come.
    """

    tokens_seen: int
    tokens_exact: int
    tokens_retrieved: int
    compressed_key_bytes: int
    compressed_value_bytes: int
    fp16_key_bytes: int
    fp16_value_bytes: int
    codebook_bytes: int
    payload_bits: int
    values: int
    coded_values: int
    predicted_bytes: int
    resident_bytes: int
    reserved_bytes: int

    @property
    def compression_ratio(self) -> float:
        """Coded tokens: float16 bytes over stored bytes; 1 where none is coded."""
        stored = self.compressed_key_bytes + self.compressed_value_bytes
        return (self.fp16_key_bytes + self.fp16_value_bytes) / stored if stored else 1.0

    @property
    def assigned_avg_bits(self) -> float:
        """Code bits a coded value, without side information."""
        return self.payload_bits / self.coded_values if self.coded_values else 0.0

    @property
    def bits_per_value(self) -> float:
        """All resident bits over all values: exact tokens, gains, slack; no shared tables."""
        return 8 * self.resident_bytes / self.values if self.values else 0.0

    @property
    def times_smaller(self) -> float:
        """A float16 cache of the same tokens over the resident bytes."""
        return _FP16 * self.values / self.resident_bytes if self.resident_bytes else 1.0

    @property
    def stored_bytes(self) -> int:
        """Resident bytes that hold tokens: to equal ``predicted_bytes``."""
        return self.resident_bytes - self.reserved_bytes


@frozen
class CacheReport(LayerReport):
    """The sums over all compressed layers, and each of them.

    Attributes:
        layers: One report a compressed layer.
        plain_layers: Caches that are not compressed, those in a ``CacheList`` one by one.
        plain_bytes: Bytes that those hold.
    """

    layers: tuple[LayerReport, ...] = ()
    plain_layers: int = 0
    plain_bytes: int = 0


def predict_bytes(layer: LayerSpec, schema: Schema, coded: int, exact: int, batch: int = 1) -> int:
    """Bytes of ``coded`` and ``exact`` tokens of one layer, by arithmetic alone."""
    row = layer.kv_heads * (layer.head_dim + layer.value_dim) * layer.mx_dtype.size
    row += schema.exact_bytes
    once = schema.constant_bytes if coded else 0
    return batch * (coded * schema.bytes_per_token + exact * row + once)


def layer_report(cache: CompressedKVCache) -> LayerReport:
    """Count one layer."""
    layer, schema = cache.layer, cache.codec.schema
    coded, exact = cache.tokens_coded, cache.offset - cache.tokens_coded
    batch = cache.batch
    per_token = layer.kv_heads * batch
    resident = cache.nbytes
    return LayerReport(
        tokens_seen=cache.offset,
        tokens_exact=exact,
        tokens_retrieved=cache.tokens_retrieved,
        compressed_key_bytes=batch * coded * schema.part_bytes("k."),
        compressed_value_bytes=batch * coded * schema.part_bytes("v."),
        fp16_key_bytes=coded * per_token * layer.head_dim * _FP16,
        fp16_value_bytes=coded * per_token * layer.value_dim * _FP16,
        codebook_bytes=cache.codec.table_bytes,
        payload_bits=batch * coded * schema.payload_bits,
        values=cache.offset * per_token * (layer.head_dim + layer.value_dim),
        coded_values=coded * per_token * (layer.head_dim + layer.value_dim),
        predicted_bytes=predict_bytes(layer, schema, coded, exact, batch),
        resident_bytes=resident,
        reserved_bytes=cache.reserved_bytes,
    )


def batch_report(rows: Sequence[CompressedKVCache]) -> LayerReport:
    """Count one layer of a batch: the bytes of all rows, and the tokens of the longest."""
    every = [layer_report(row) for row in rows]
    longest = max(every, key=lambda row: row.tokens_seen)
    total = {
        field.name: sum(getattr(row, field.name) for row in every)
        for field in attrs.fields(LayerReport)
        if not field.name.startswith("tokens_") and field.name != "codebook_bytes"
    }
    return attrs.evolve(longest, **total)


def report(caches: Sequence[Any]) -> CacheReport:
    """The numbers of a model's list of caches.

    Args:
        caches: What ``make_cache`` returned, or a batch merged of it; plain caches are counted
            apart.

    Returns:
        Sums over the compressed layers; tables that layers share are counted once.

    Raises:
        ConfigError: It is no list of caches.
    """
    from kvcompress.cache.batch import CompressedBatchCache
    from kvcompress.cache.kvcache import CompressedKVCache

    check_caches("report", caches)
    every = leaves(caches)
    ours = [c for c in every if isinstance(c, CompressedKVCache | CompressedBatchCache)]
    plain = [c for c in every if not isinstance(c, CompressedKVCache | CompressedBatchCache)]
    rows = [c.rows if isinstance(c, CompressedBatchCache) else [c] for c in ours]
    layers = tuple(batch_report(held) for held in rows if held)

    def total(name: str) -> int:
        return sum(getattr(r, name) for r in layers)

    return CacheReport(
        tokens_seen=max((r.tokens_seen for r in layers), default=0),
        tokens_exact=max((r.tokens_exact for r in layers), default=0),
        tokens_retrieved=max((r.tokens_retrieved for r in layers), default=0),
        **{
            name: total(name)
            for name in (
                "compressed_key_bytes",
                "compressed_value_bytes",
                "fp16_key_bytes",
                "fp16_value_bytes",
                "payload_bits",
                "values",
                "coded_values",
                "predicted_bytes",
                "resident_bytes",
                "reserved_bytes",
            )
        },
        codebook_bytes=shared_table_bytes([row.codec for held in rows for row in held]),
        layers=layers,
        plain_layers=len(plain),
        plain_bytes=sum(int(c.nbytes) for c in plain),
    )


def shared_table_bytes(roots: Sequence[object]) -> int:
    """Bytes of every array reachable from codecs, each array once."""
    import mlx.core as mx

    from kvcompress.cache.walk import reachable_arrays

    return sum(int(a.nbytes) for a in reachable_arrays(roots) if isinstance(a, mx.array))
