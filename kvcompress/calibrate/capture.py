"""The pass itself: run the model over the windows with recording caches in place of its own."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
from threadpoolctl import ThreadpoolController

from kvcompress.cache.dispatch import install
from kvcompress.cache.native import native_caches
from kvcompress.cache.nested import leaves, with_leaves
from kvcompress.cache.trace import trace
from kvcompress.calibrate.contract import Progress
from kvcompress.calibrate.recorder import SKIP, LayerRecorder, RecordingCache, Rows
from kvcompress.calibrate.samples import LayerSamples
from kvcompress.calibrate.selection import choose_rows
from kvcompress.errors import UnsupportedModel
from kvcompress.layers import LayerSpec

SAMPLE_BYTES: Final = 2 << 30
QUERY_TOKENS: Final = 1024
CHUNK: Final = 256  # tokens a forward step: fewer transients, and less attention to what is masked


def record(
    model: Any,
    windows: list[list[int]],
    *,
    skip: int = SKIP,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[LayerSamples]:
    """Record every layer that can be compressed in one pass over the windows.

    Moments are over all tokens. The sample holds all tokens too, or as many as fit in 2 GiB over
    all layers. The model's output layer is never computed.

    Args:
        model: An mlx-lm model.
        windows: Token ids; each window starts with fresh caches.
        skip: First tokens of each window that are left out, for they are kept exact.
        seed: Chooses the sampled tokens where not all fit.
        progress: Told of each window, in tokens.

    Raises:
        UnsupportedModel: No layer can be compressed, or the model computes no finite numbers.
    """
    of_caches = [LayerRecorder(slot.layer, skip) if slot.layer else None for slot in trace(model)]
    recorders = [recorder for recorder in of_caches if recorder is not None]
    if not recorders:
        raise UnsupportedModel("calibrate: no layer of the model keeps a cache to compress")
    sample = SAMPLE_BYTES // sum(_row_bytes(recorder.layer) for recorder in recorders)
    lengths = [len(window) for window in windows]
    chosen = choose_rows(lengths, sample, skip=skip, seed=seed)
    chosen_queries = choose_rows(lengths, QUERY_TOKENS, skip=skip, seed=seed)
    done, total = 0, sum(lengths)
    lease = install(model)
    # NumPy's wheels bring a BLAS whose idle threads would take the cores from MLX's own.
    numpy_blas = ThreadpoolController().select(prefix="libscipy_openblas")
    try:
        with numpy_blas.limit(limits=1):
            for window, rows, query_rows in zip(windows, chosen, chosen_queries, strict=True):
                if progress:
                    progress("recording", done, total)
                caches = _recording(native_caches(model), of_caches, rows, query_rows)
                # Recording computes each layer as it is reached; the logits stay lazy, unused.
                for start in range(0, len(window), CHUNK):
                    model(mx.array(window[start : start + CHUNK])[None], cache=caches)
                done += len(window)
    finally:
        lease.release()
    if progress:
        progress("recording", done, total)
    return [recorder.finish() for recorder in recorders]


def _recording(
    caches: list[Any], recorders: list[LayerRecorder | None], rows: Rows, query_rows: Rows
) -> list[Any]:
    """A model's caches, each that has a recorder inside a cache that shows what it gets."""

    def shown(cache: Any, recorder: LayerRecorder | None) -> Any:
        return RecordingCache(cache, recorder, rows, query_rows) if recorder else cache

    return with_leaves(caches, map(shown, leaves(caches), recorders))


def _row_bytes(layer: LayerSpec) -> int:
    return 4 * layer.kv_heads * (layer.head_dim + layer.value_dim)
