"""Codebooks and query moments that the user gives, in place of a calibration's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcompress.errors import ConfigError
from kvcompress.layers import LayerSpec
from kvcompress.stages.hashing import noise

Float64 = NDArray[np.float64]


def check_codebook(name: str, codebook: Any, entries: int, size: int) -> None:
    """Refuse a codebook whose last axes do not fit the options.

    Raises:
        ConfigError: Naming the shapes that are legal.
    """
    if not isinstance(codebook, np.ndarray):
        return
    if codebook.ndim not in (2, 3, 4) or codebook.shape[-2:] != (entries, size):
        raise ConfigError(
            f"a2ats: {name} must have shape ({entries}, {size}), (heads, {entries}, {size}) or "
            f"(heads, head_dim / {size}, {entries}, {size}) to match sub_dim={size} and "
            f"codebook_bits={entries.bit_length() - 1} (got {codebook.shape})"
        )


def check_query_h(query_h: Any, size: int) -> None:
    """Refuse what is no second moment of ``size`` channels.

    Raises:
        ConfigError: Naming what is legal.
    """
    if query_h is None:
        return
    if query_h.ndim not in (2, 3) or query_h.shape[-2:] != (size, size):
        raise ConfigError(
            f"a2ats: query_h must have shape ({size}, {size}) to match sub_dim={size}, or "
            f"(heads, {size}, {size}) (got {query_h.shape})"
        )
    wide = query_h.astype(np.float64)
    largest = np.abs(wide).max()
    if np.abs(wide - wide.swapaxes(-1, -2)).max() > 1e-5 * largest:
        raise ConfigError("a2ats: query_h must be symmetric, being E[q^T q]")
    if not largest or np.linalg.eigvalsh(wide).min() < -1e-5 * largest:
        raise ConfigError("a2ats: query_h must be positive, being E[q^T q]")


def codebook_for(
    name: str, codebook: Any, layer: LayerSpec, dim: int, entries: int, size: int
) -> NDArray[np.float16]:
    """A codebook of one layer, ``(H or 1, D / s or 1, entries, s)`` float16.

    Raises:
        ConfigError: It is for other heads, or for another head size.
    """
    if isinstance(codebook, str):
        drawn = noise((1, 1, entries, size), "a2ats", name).astype(np.float16)
        drawn[..., 0, :] = 0  # as fitted ones: a code is never further off than none
        return drawn
    shape = codebook.shape
    heads = shape[0] if codebook.ndim > 2 else 1
    spaces = shape[1] if codebook.ndim > 3 else 1
    if heads not in (1, layer.kv_heads) or spaces not in (1, dim // size):
        raise ConfigError(
            f"a2ats: {name} of shape {shape} is for {heads} heads and {spaces} sub-vectors; layer "
            f"{layer.index} has {layer.kv_heads} and {dim // size}"
        )
    with np.errstate(over="ignore"):
        kept = np.asarray(codebook.reshape(heads, spaces, entries, size), dtype=np.float16)
    if not np.isfinite(kept).all():
        raise ConfigError(f"a2ats: {name} must be finite in float16, as it is kept")
    return kept


def moment_for(query_h: NDArray[np.float32], layer: LayerSpec) -> Float64:
    """``query_h`` at each of a head's sub-vectors: ``(H, D, D)``.

    Raises:
        ConfigError: It is for other heads.
    """
    size = query_h.shape[-1]
    blocks = query_h.reshape(-1, size, size).astype(np.float64)
    if len(blocks) not in (1, layer.kv_heads):
        raise ConfigError(
            f"a2ats: query_h must be for the {layer.kv_heads} KV heads of layer {layer.index} "
            f"(got {len(blocks)})"
        )
    return np.stack([np.kron(np.eye(layer.head_dim // size), block) for block in blocks])
