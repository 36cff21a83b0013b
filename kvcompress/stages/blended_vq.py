"""Product codes chosen by length and direction: for queries that nobody has seen."""

from __future__ import annotations

import mlx.core as mx
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.stages.product_vq import ProductVQ
from kvcompress.stages.tables import chunked, nearest


@frozen(eq=False)
class BlendedVQ:
    """A product quantiser whose nearest entry is that of least blended error.

    ``(1 - beta) |x - c|^2 + beta |x|^2 (1 - cos(x, c))``: a score errs by the length of the error
    where nothing is known of the query, and attention is forgiving of a key's length, which moves
    all its scores alike. Scaling vectors and entries together changes no choice.

    Attributes:
        book: Decodes, and gives its codebook; its metric is not used.
        beta: Weight of the direction, from 0 (the plain nearest entry) to 1.
    """

    book: ProductVQ
    beta: float = 0.5
    bits: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(f"BlendedVQ: beta must be from 0 to 1 (got {self.beta})")
        object.__setattr__(self, "bits", self.book.bits)

    @property
    def dim(self) -> int:
        """Channels of a vector, ``D``."""
        return self.book.dim

    @property
    def sub_dim(self) -> int:
        """Channels of a sub-vector, ``s``."""
        return self.book.sub_dim

    @property
    def codes(self) -> int:
        """Codes a vector."""
        return self.book.codes

    @property
    def table_bytes(self) -> int:
        """Bytes of the codebook."""
        return self.book.table_bytes

    def encode(self, u: mx.array) -> mx.array:
        """The best entries of ``(B, H, T, D)`` float32: ``(B, H, T, D / s)``, ties to the lower."""
        entries = self.book.codebook.astype(mx.float32)[:, None]  # (H, 1, n, K, s)
        energy = mx.square(entries).sum(axis=-1)[..., None, :]
        length = mx.sqrt(energy)
        unit_scale = mx.where(length > 0, 1.0 / mx.maximum(length, 1e-30), 0.0)
        n, size = self.codes, self.sub_dim

        def encode_few(groups: mx.array) -> mx.array:
            cut = groups.reshape(*groups.shape[:-1], n, size).swapaxes(3, 4)
            products = cut @ entries.swapaxes(-1, -2)
            own = mx.sqrt(mx.square(cut).sum(axis=-1, keepdims=True))
            plain = energy - 2.0 * products
            turned = -own * products * unit_scale
            return nearest((1.0 - self.beta) * plain + self.beta * turned).swapaxes(3, 4)

        return chunked(encode_few, u, u.shape[1] * n << self.bits)

    def decode(self, codes: mx.array) -> mx.array:
        """``(B, H, T, D / s)`` to ``(B, H, T, D)`` float32."""
        return self.book.decode(codes)

    def tables(self, q: mx.array) -> mx.array:
        """Scores of queries against every entry, as the codebook's."""
        return self.book.tables(q)

    def dots(self, q: mx.array, codes: mx.array) -> mx.array:
        """``q @ decode(codes)^T``, as the codebook's."""
        return self.book.dots(q, codes)

    def sums(self, weights: mx.array, codes: mx.array) -> mx.array:
        """``p @ decode(codes)``, as the codebook's."""
        return self.book.sums(weights, codes)
