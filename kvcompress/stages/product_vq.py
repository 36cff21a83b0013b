"""Product vector quantisation: each sub-vector to the nearest entry of a codebook.

``D`` channels are cut into ``D / s`` sub-vectors of ``s`` neighbouring channels, each coded by
``bits`` bits: ``bits / s`` bits a channel (Jegou, Douze and Schmid, 2011; VecInfer, arXiv
2510.06175; A2ATS, arXiv 2502.12665).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from attrs import evolve, field, frozen

from kvcompress.errors import ConfigError
from kvcompress.stages.products import complex_pays
from kvcompress.stages.tables import chunked, gather, nearest

MAX_BITS = 12


def evaluated(owner: str, name: str, values: np.ndarray | mx.array, dims: int) -> mx.array:
    """A table of ``dims`` axes as float16 where it is given so, else float32.

    Raises:
        ConfigError: It has other axes, or entries that are not finite.
    """
    table = values if isinstance(values, mx.array) else mx.array(np.asarray(values))
    if table.dtype not in (mx.float16, mx.float32):
        table = table.astype(mx.float32)
    if table.ndim != dims:
        raise ConfigError(f"{owner}: {name} must have {dims} axes (got shape {table.shape})")
    if not mx.isfinite(table).all().item():
        raise ConfigError(f"{owner}: {name} must be finite in {table.dtype}")
    mx.eval(table)
    return table


def bits_of(owner: str, entries: int) -> int:
    """Bits of a code that names one of ``entries``.

    Raises:
        ConfigError: That is not a whole number from 1 to 12.
    """
    bits = entries.bit_length() - 1
    if entries != 1 << bits or not 1 <= bits <= MAX_BITS:
        raise ConfigError(
            f"{owner}: a codebook must have 2, 4, ... or {1 << MAX_BITS} entries (got {entries})"
        )
    return bits


def _codebook(values: np.ndarray | mx.array) -> mx.array:
    return evaluated("ProductVQ", "codebook", values, 4)


def _metric(values: np.ndarray | mx.array | None) -> mx.array | None:
    return None if values is None else evaluated("ProductVQ", "metric", values, 4)


@frozen(eq=False)
class ProductVQ:
    """Sub-vectors to entries of a codebook, each head's and sub-space's own or shared.

    The codebook may be float16, at half the bytes: distances are measured to the entries as they
    decode. With a metric the nearest entry is the one of least ``(x - c) M (x - c)^T`` (A2ATS,
    Eq. 14), which equals whitening by a Cholesky factor of ``M`` and costs nothing to decode.

    Attributes:
        codebook: ``(H or 1, D / s or 1, 2**bits, s)``.
        dim: Channels of a vector, ``D``; from the codebook unless sub-spaces share it.
        metric: ``(H or 1, D / s or 1, s, s)`` symmetric positive, or ``None`` for the identity.
    """

    codebook: mx.array = field(converter=_codebook)
    dim: int = 0
    metric: mx.array | None = field(default=None, converter=_metric)
    bits: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        heads, spaces, entries, size = self.codebook.shape
        object.__setattr__(self, "bits", bits_of("ProductVQ", entries))
        dim = self.dim or spaces * size
        object.__setattr__(self, "dim", dim)
        if size < 1 or dim % size or spaces not in (1, dim // size):
            raise ConfigError(
                f"ProductVQ: a codebook for {dim} channels in sub-vectors of {size} must have "
                f"1 or {dim / max(size, 1):g} sub-spaces (got {spaces})"
            )
        if self.metric is not None:
            H, n, *square = self.metric.shape
            fits = heads == H or 1 in (heads, H)
            if square != [size, size] or n not in (1, dim // size) or not fits:
                raise ConfigError(
                    f"ProductVQ: metric must have shape (heads or 1, {dim // size} or 1, {size}, "
                    f"{size}) to match the codebook {self.codebook.shape} "
                    f"(got {self.metric.shape})"
                )

    @property
    def sub_dim(self) -> int:
        """Channels of a sub-vector, ``s``."""
        return int(self.codebook.shape[3])

    @property
    def codes(self) -> int:
        """Codes a vector: one a sub-vector."""
        return self.dim // self.sub_dim

    @property
    def table_bytes(self) -> int:
        """Bytes of the codebook and the metric."""
        metric = 0 if self.metric is None else int(self.metric.nbytes)
        return int(self.codebook.nbytes) + metric

    def plain(self) -> ProductVQ:
        """The same codebook, with the nearest entry by the identity."""
        return evolve(self, metric=None)

    def energy(self, u: mx.array) -> mx.array:
        """``u M u^T``: ``(B, H, T, D)`` float32 to ``(B, H, T)``.

        With a metric ``E[q^T q]`` the expected square of a score.
        """
        n, size = self.codes, self.sub_dim

        def energy_few(groups: mx.array) -> mx.array:
            cut = groups.reshape(*groups.shape[:-1], n, size).swapaxes(3, 4)
            seen = cut if self.metric is None else cut @ self.metric.astype(mx.float32)[:, None]
            return (seen * cut).sum(axis=(3, 5))[..., None]

        return chunked(energy_few, u, u.shape[1] * self.dim)[..., 0]

    def encode(self, u: mx.array) -> mx.array:
        """The nearest entries of ``(B, H, T, D)`` float32: ``(B, H, T, D / s)``, ties to the lower.

        Distances are held for a few tokens at a time.
        """
        entries = self.codebook.astype(mx.float32)
        seen = entries if self.metric is None else entries @ self.metric
        # One product gives |c|^2 - 2 x c: what of the distance depends on the entry.
        energy = (seen * entries).sum(axis=-1, keepdims=True)
        table = mx.concatenate([seen * -2.0, energy], axis=-1).swapaxes(-1, -2)
        n, size = self.codes, self.sub_dim

        def encode_few(groups: mx.array) -> mx.array:
            cut = groups.reshape(*groups.shape[:-1], n, size).swapaxes(3, 4)
            padded = mx.concatenate([cut, mx.ones((*cut.shape[:-1], 1))], axis=-1)
            return nearest(padded @ table[:, None]).swapaxes(3, 4)

        return chunked(encode_few, u, u.shape[1] * n << self.bits)

    def decode(self, codes: mx.array) -> mx.array:
        """``(B, H, T, D / s)`` to ``(B, H, T, D)`` float32: a view of ``(B, H, D, T)``."""
        B, H, T, _ = codes.shape
        entries = self.codebook.astype(mx.float32).swapaxes(-1, -2)
        return gather(entries[None], codes).reshape(B, H, self.dim, T).swapaxes(-1, -2)

    def tables(self, q: mx.array) -> mx.array:
        """Scores of queries against every entry: ``(B, H, M, D)`` to ``(B, H, D / s, M, 2**bits)``.

        The score of a token is the sum of its codes' entries over the sub-spaces.
        """
        B, H, M, _ = q.shape
        cut = q.reshape(B, H, M, self.codes, self.sub_dim).swapaxes(2, 3)
        return cut @ self.codebook.astype(q.dtype).swapaxes(-1, -2)

    def dots(self, q: mx.array, codes: mx.array) -> mx.array:
        """``q @ decode(codes)^T``: ``(B, H, M, D)`` float32 to ``(B, H, M, T)``."""
        if not self._halves(q.shape[2]):
            return q @ self.decode(codes).swapaxes(-1, -2)
        return mx.real(mx.conj(q.view(mx.complex64)) @ self._pairs(codes))

    def sums(self, weights: mx.array, codes: mx.array) -> mx.array:
        """``p @ decode(codes)``: ``(B, H, M, T)`` float32 to ``(B, H, M, D)``."""
        if not self._halves(weights.shape[2]):
            return weights @ self.decode(codes)
        sums = weights.astype(mx.complex64) @ self._pairs(codes).swapaxes(-1, -2)
        return sums.view(mx.float32)

    def _halves(self, rows: int) -> bool:
        """Whether to look channels up in pairs, as complex numbers."""
        return self.sub_dim % 2 == 0 and complex_pays(rows)

    def _pairs(self, codes: mx.array) -> mx.array:
        """Pairs of decoded channels, ``(B, H, D / 2, T)`` complex64."""
        B, H, T, _ = codes.shape
        entries = self.codebook.astype(mx.float32).view(mx.complex64).swapaxes(-1, -2)
        return gather(entries[None], codes).reshape(B, H, self.dim // 2, T)
