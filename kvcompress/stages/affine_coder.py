"""MLX's own group quantisation, the code of mlx-lm's quantised cache."""

from __future__ import annotations

import mlx.core as mx
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.schema import Field
from kvcompress.stages.affine_words import KERNEL_BITS, KERNEL_GROUPS, AffineWords
from kvcompress.stages.base import Fields
from kvcompress.stages.pack import words


@frozen
class AffineCoder:
    """A scale and a bias for every ``group_size`` channels: ``mx.quantize`` (mode ``affine``).

    Rows are quantised in the layer's own dtype, so the words are those that mlx-lm's
    ``QuantizedKVCache`` stores. Scales and biases are those too for 16-bit layers. For a float32
    layer they are rounded to float16, which halves them.

    Fields: ``codes``, packed words; ``scales`` and ``biases``, one each a group.

    Attributes:
        dim: Channels, ``D``, a multiple of ``group_size``.
        heads: Heads of a layer, ``H``.
        bits: 2, 3, 4, 5, 6 or 8 bits a channel.
        group_size: 32, 64 or 128 channels.
        dtype: Name of the layer's dtype.
    """

    dim: int
    heads: int
    bits: int
    group_size: int = 64
    dtype: str = "float16"
    table_bytes: int = field(default=0, init=False)
    _words: AffineWords = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.bits not in KERNEL_BITS:
            raise ConfigError(
                f"AffineCoder: bits must be one of {_listed(KERNEL_BITS)} (got {self.bits})"
            )
        legal = legal_groups(self.dim)
        if self.group_size not in legal:
            raise ConfigError(
                f"AffineCoder: group_size must be one of {_listed(legal) or 'none'} to divide "
                f"head_dim {self.dim} (got {self.group_size})"
            )
        groups = self.dim // self.group_size
        object.__setattr__(self, "_words", AffineWords(self.dim, self.bits, groups))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Codes, scales and biases."""
        stored = "float16" if self.dtype == "float32" else self.dtype
        groups = self.dim // self.group_size
        return (
            Field(
                "codes",
                "uint32",
                words(self.dim, self.bits),
                self.heads,
                payload_bits=self.dim * self.bits,
            ),
            Field("scales", stored, groups, self.heads),
            Field("biases", stored, groups, self.heads),
        )

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        """``(B, H, T, D)`` float32 to codes, scales and biases."""
        if self.dtype == "float32":
            # Scales in float16 cannot span more; no model comes near.
            limit = mx.finfo(mx.float16).max
            z = mx.clip(z, -limit, limit)
        codes, scales, biases = mx.quantize(
            z.astype(getattr(mx, self.dtype)), group_size=self.group_size, bits=self.bits
        )
        stored = getattr(mx, self.fields[1].dtype)
        return {"codes": codes, "scales": scales.astype(stored), "biases": biases.astype(stored)}

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields to ``(B, H, T, D)`` float32."""
        return self._words.decode(fields["codes"], fields["scales"], fields["biases"])

    def scores(self, q: mx.array, fields: Fields) -> mx.array:
        """``q . z`` from the codes: ``(B, H, M, D)`` to ``(B, H, M, T)``."""
        return self._words.scores(q, fields["codes"], fields["scales"], fields["biases"])

    def mix(self, weights: mx.array, fields: Fields) -> mx.array:
        """``p @ z`` from the codes: ``(B, H, M, T)`` to ``(B, H, M, D)``."""
        return self._words.mix(weights, fields["codes"], fields["scales"], fields["biases"])


def legal_groups(dim: int) -> tuple[int, ...]:
    """Group sizes that MLX takes and that divide ``dim``, the largest first."""
    return tuple(group for group in KERNEL_GROUPS if dim % group == 0)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
