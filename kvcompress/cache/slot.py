"""What a trace says of one cache: whether it can be compressed, and the layer behind it."""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
import numpy as np
from attrs import frozen

from kvcompress.cache.probe import Probe, Turn, Write
from kvcompress.errors import ConfigError, UnsupportedModel
from kvcompress.layers import LayerSpec, Rotary

CHUNK = 3  # tokens of a trace's first run; its second run has one

_DTYPES = {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"}
_LEFT = {
    "RotatingKVCache": "its sliding window bounds it",
    "ChunkedKVCache": "its attention chunk bounds it",
    "ArraysCache": "it holds a recurrent state, which does not grow",
    "QuantizedKVCache": "it is quantised by mlx-lm",
}


@frozen
class Slot:
    """One cache of a model.

    Attributes:
        index: Its entry's place in the model's list; caches bundled in one entry share it.
        kind: ``"compress"``; ``"plain"`` for what is no plain ``KVCache``; ``"unsupported"`` for
            one that is used in a way that rules compression out.
        reason: One sentence: why it is left as the model makes it, or what its compression lacks.
        layer: The layer behind it, where it can be compressed.
        query_visible: Whether attention meets the codes; otherwise each step decodes the layer.
        readers: How many attention layers read it in a step.
        scale: The factor on the scores, where all readers share one.
        sinks: Whether attention adds learnt sink logits.
        masks: The kinds of mask seen: ``"none"``, ``"causal"``, ``"bool"``, ``"additive"``.
    """

    index: int
    kind: Literal["compress", "plain", "unsupported"]
    reason: str = ""
    layer: LayerSpec | None = None
    query_visible: bool = False
    readers: int = 0
    scale: float | None = None
    sinks: bool = False
    masks: frozenset[str] = frozenset()


def plain_slot(index: int, cache: Any) -> Slot:
    """The slot of a cache that is no plain ``KVCache``."""
    name = type(cache).__name__
    return Slot(index, "plain", f"{name}: {_LEFT.get(name, 'only plain KVCaches are compressed')}")


def probed_slot(index: int, probe: Probe, number: int) -> Slot:
    """The slot of a ``KVCache`` from what the model did with the probe in its place.

    Args:
        index: Its entry's place in the model's list.
        probe: The probe, after the runs.
        number: Tells its layer from all others.

    Raises:
        UnsupportedModel: A table of the rotation belongs to another thread.
    """
    fault = _fault(probe)
    if fault:
        return Slot(index, "unsupported", fault)
    chunk, single = probe.runs[:2]
    write, reads = single.writes[0], chunk.reads + single.reads
    visible = bool(chunk.reads and single.reads)
    rotary, known = _rotation(probe)
    layer = LayerSpec(
        index=number,
        kv_heads=write.keys[1],
        query_heads=reads[0].query_heads if visible else write.keys[1],
        head_dim=write.keys[3],
        value_dim=write.values[3],
        dtype=_DTYPES[write.dtypes[0]],
        rotary=rotary,
        rotary_known=known,
    )
    scales = {read.scale for read in reads}
    return Slot(
        index,
        "compress",
        "" if visible else "its attention is the model's own, so each step decodes the layer",
        layer,
        query_visible=visible,
        readers=len(single.reads) if visible else single.fetches,
        scale=scales.pop() if len(scales) == 1 else None,
        sinks=any(read.sinks for read in reads),
        masks=frozenset(read.mask for read in reads),
    )


def _fault(probe: Probe) -> str:
    """Why the cache cannot be compressed; empty if it can."""
    runs = probe.runs[:2]
    writes = [write for run in runs for write in run.writes]
    if probe.bypassed:
        return "the model takes its arrays past the cache's interface"
    if not all(run.writes for run in runs):
        return "no layer stores keys and values in it"
    if len(writes) > len(runs):
        return "several layers store into it"
    if any(write.latent for write in writes) or any(run.misread for run in runs):
        return "it holds a latent in place of keys and values (MLA)"
    return _odd_arrays(writes) or _odd_queries(probe)


def _odd_arrays(writes: list[Write]) -> str:
    first = writes[0]
    rows = [(1, first.keys[1], tokens) for tokens in (CHUNK, 1)]
    shapes = [shape for write in writes for shape in (write.keys, write.values)]
    if any(len(shape) != 4 for shape in shapes) or any(
        write.keys[:3] != row or write.values[:3] != row
        for write, row in zip(writes, rows, strict=True)
    ):
        return f"its arrays are not (B, heads, tokens, channels): {first.keys}, {first.values}"
    dtypes = {dtype for write in writes for dtype in write.dtypes}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        names = sorted(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)
        return f"its dtype must be one of float16, bfloat16, float32 (got {', '.join(names)})"
    return ""


def _odd_queries(probe: Probe) -> str:
    kv_heads = probe.runs[0].writes[0].keys[1]
    heads = {read.query_heads for run in probe.runs[:2] for read in run.reads}
    odd = sorted(h for h in heads if h % kv_heads)
    return f"its {kv_heads} key heads do not divide {odd[0]} query heads" if odd else ""


def _rotation(probe: Probe) -> tuple[Rotary | None, bool]:
    """The rotation that the keys bear, and whether that is known for certain."""
    writes = [write for run in probe.runs for write in run.writes]
    turns = [write.turn for write in writes if write.turn is not None]
    if len(turns) < len(writes):
        return None, not any(write.rotated for write in writes)
    near = writes[:2]  # a far run may count positions otherwise than the cache it pretends to be
    if any(w.turn is None or _position(w.turn.offset) != w.offset for w in near):
        return None, False
    # Far away the arguments differ where the rotation depends on the position, as dynamic NTK does.
    rotations = {_rotary(turn) for turn in turns}
    rotary = rotations.pop()
    return (None, False) if rotations or rotary is None else (rotary, True)


def _position(offset: int | mx.array) -> int:
    return int(np.asarray(_computed(offset)).item()) if isinstance(offset, mx.array) else offset


def _rotary(turn: Turn) -> Rotary | None:
    if not isinstance(turn.base, int | float | None):
        return None
    try:
        freqs = None if turn.freqs is None else _computed(turn.freqs)
        return Rotary(turn.dims, turn.traditional, turn.base, turn.scale, freqs)
    except ConfigError:
        return None


def _computed(table: mx.array) -> mx.array:
    try:
        mx.eval(table)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"trace: a table of the model's rotation was made in another thread and cannot be "
            f"computed in this one ({error}); run the model once in the thread that loaded it"
        ) from error
    return table
