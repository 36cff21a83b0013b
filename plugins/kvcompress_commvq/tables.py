"""What a calibration gives commvq: tables that commute with RoPE, and codebooks of values."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcompress.calibrate.contract import Tables
from kvcompress.fit.em import fit_commuting
from kvcompress.layers import LayerSpec
from kvcompress.stages.commuting_vq import CommutingVQ, complex_pairs
from kvcompress.stages.gain import decode_gain, encode_gain, row_gain
from kvcompress.stages.hashing import noise
from kvcompress.stages.shared import shared_table

ENTRIES: Final = 64  # of a table: two choices of 6 bits make the 12 of a stage
TOKENS: Final = 8192  # that tables are fitted to at most

_ROUNDS = 6  # twice as many gain less than twice the tokens, and cost as much
_TOKENS_A_ROUND = 512  # beyond the first two rounds: few tokens have less to teach
_HELD_OUT = 8  # of so many tokens one is not fitted to, but decides how long entries are
_COUNTED = 4  # of so many tokens one is coded to find entries that serve none


def unit_rows(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """Keys ``(N, H, D)`` divided by what a ``VQCoder`` stores as the gain of each token."""
    N = len(keys)
    rms, _ = row_gain(mx.array(keys.reshape(N, -1)))
    gain = decode_gain(encode_gain(rms))
    return np.asarray(keys / np.array(mx.where(gain > 0, gain, 1.0))[:, :, None])


def fit_keys(keys: NDArray[np.float32], layer: LayerSpec, stages: int, seed: int) -> dict[str, Any]:
    """Tables for keys ``(N, H, D)`` before RoPE, each token divided by one gain.

    Returns:
        ``turning`` and ``still`` as for :class:`CommutingVQ`, float16; the share of the energy
        that the last stage leaves; and the entries but the first that serve none
        of some of the tokens.
    """
    rows = unit_rows(keys).swapaxes(0, 1)
    fit = fit_commuting(
        *complex_pairs(rows, layer.rotary),
        stages=stages,
        entries=ENTRIES,
        seed=seed,
        rounds=min(_ROUNDS, 2 + len(keys) // _TOKENS_A_ROUND),
        hard_rounds=0,
        held_out=_HELD_OUT,
    )
    tables = {
        "turning": fit.turning.astype(np.float16),
        "still": fit.still.astype(np.float16),
    }
    some = mx.array(rows[:, ::_COUNTED])[None]
    codes = np.array(quantiser_of(tables, layer).encode(some))[0]
    return {
        **tables,
        "report.keys_left": float(fit.error[-1].sum() / max(fit.error[0].sum(), 1e-30)),
        "report.dead_centroids": _unused(codes),
    }


def _unused(codes: NDArray[np.uint8]) -> int:
    """Entries but the first that neither of their two roles calls for: ``(H, N, 2 R)``."""
    H, N, R = codes.shape[0], codes.shape[1], codes.shape[2] // 2
    used = np.zeros((H, R, ENTRIES), dtype=bool)
    head, stage = np.arange(H)[:, None, None, None], np.arange(R)[:, None]
    used[head, stage, codes.reshape(H, N, R, 2)] = True
    return int((~used[:, :, 1:]).sum())


def random_keys(layer: LayerSpec, stages: int, seed: int) -> dict[str, NDArray[np.float16]]:
    """Tables out of a hash, each stage's as large as what the ones before it should leave."""
    dims = 0 if layer.rotary is None else layer.rotary.dims
    H, P, Q = layer.kv_heads, dims // 2, layer.head_dim - dims
    turning = noise((H, stages, ENTRIES, 2, P), "commvq", "turning", seed)
    still = noise((H, stages, 2, ENTRIES, Q), "commvq", "still", seed)
    turning[:, :, 0] = 0
    still[:, :, :, 0] = 0
    rate = 2.0 ** (-12 / layer.head_dim)  # by which the best code of 12 bits shrinks noise
    size = np.sqrt((1 - rate**2) / 2) * rate ** np.arange(stages).reshape(-1, 1, 1, 1)
    return {
        "turning": (size * turning).astype(np.float16),
        "still": (size * still).astype(np.float16),
    }


def quantiser_of(tables: Tables, layer: LayerSpec) -> CommutingVQ:
    """The quantiser of tables, which two layers with equal ones share."""
    still = tables["still"]
    return CommutingVQ(
        shared_table(tables["turning"]),
        layer.rotary,
        shared_table(still) if still.shape[-1] else None,
    )
