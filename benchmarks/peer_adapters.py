"""How ``peers.py`` makes a model's caches with mlx-lm, with kvcompress and with other packages.

Other packages are driven through their public interfaces only, and imported only when their row
runs. A *maker* is called with the model and the row's tables, and gives a function that makes the
caches of one new sequence. A *fit* makes tables from activations, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

Caches = Callable[[], list[Any]]
Samples = Callable[[], Sequence[Any]]
"""Gives each layer's :class:`~kvcompress.calibrate.samples.LayerSamples`, first tokens included."""

VECTORS = 32768
"""Vectors that a codebook of a peer is trained on, at most, or as many as these to an entry:"""
VECTORS_AN_ENTRY = 32

POSITIONS = 8192
"""That keys are spread over before they are looked at rotated, as for kvcompress's own tables."""


# mlx-lm's own caches


def plain(model: Any, tables: None) -> Caches:
    """The caches that the model makes for itself."""
    from mlx_lm.models.cache import make_prompt_cache

    return lambda: make_prompt_cache(model)


def half(model: Any, tables: None) -> Caches:
    """Plain caches that are given float16."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    class HalfKVCache(KVCache):
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            return super().update_and_fetch(keys.astype(mx.float16), values.astype(mx.float16))

    return lambda: [HalfKVCache() for _ in model.layers]


def quantised(model: Any, tables: None, *, bits: int, group_size: int) -> Caches:
    """mlx-lm's group quantisation."""
    from mlx_lm.models.cache import QuantizedKVCache

    return lambda: [QuantizedKVCache(group_size=group_size, bits=bits) for _ in model.layers]


# kvcompress


def fit_ours(samples: Samples, *, method: str) -> None:
    """Make a method's calibration, if it lacks one; the cache folder keeps it."""
    _calibration(method)


def ours(model: Any, tables: None, *, method: str) -> Caches:
    """A method of kvcompress."""
    from kvcompress.compare.methods import method_of

    made = method_of(method, _calibration(method))
    return lambda: made.make_cache(model)


def _calibration(method: str) -> Any:
    from kvcompress.compare.calibrated import lacking, make
    from kvcompress.errors import KVCompressError

    made = make(lacking([method]))
    if method in made.errors:
        raise KVCompressError(made.errors[method])
    return made.calibration


# veloxquant-mlx


def velox(model: Any, tables: dict[str, Any] | None, **config: Any) -> Caches:
    """One configuration for all layers, as the package's quick start does."""
    from veloxquant_mlx import KVCacheBuilder, KVCacheConfig

    whole = KVCacheConfig(**config, **_arrays(tables or {}))
    return lambda: KVCacheBuilder.for_model(model, whole)


def velox_layers(model: Any, tables: Sequence[dict[str, Any]], **config: Any) -> Caches:
    """One configuration a layer."""
    from veloxquant_mlx import KVCacheConfig, KVCacheFactory

    configs = [
        KVCacheConfig(**config, **_arrays(layer), seed=42 + index)
        for index, layer in enumerate(tables)
    ]
    return lambda: [KVCacheFactory.create(one) for one in configs]


def _arrays(tables: dict[str, Any]) -> dict[str, Any]:
    """Tables as the package takes them; made once, so that sequences can share them."""
    import mlx.core as mx

    return {
        name: mx.array(value) if isinstance(value, np.ndarray) else value
        for name, value in tables.items()
    }


def fit_vecinfer_documented(
    samples: Samples, *, k: tuple[int, int], v: tuple[int, int]
) -> dict[str, Any]:
    """Smooth factors and one codebook each for keys and values, from all layers' activations.

    Args:
        samples: The layers' activations.
        k: Channels of a sub-vector of keys, and bits of its index.
        v: The same for values.
    """
    import mlx.core as mx
    from veloxquant_mlx import calibrate_smooth_factors

    layers = samples()
    keys = np.concatenate([one.post_keys() for one in layers])
    values = np.concatenate([one.values for one in layers])
    return {
        "smooth_factors": np.array(calibrate_smooth_factors(mx.array(keys))),
        "key_codebook": book(keys, *k, seed=42),
        "value_codebook": book(values, *v, seed=43),
    }


def vecinfer_layer(one: Any, *, k: tuple[int, int], v: tuple[int, int]) -> dict[str, Any]:
    """A layer's own factors and codebooks, keys transformed as the cache transforms them.

    Args:
        one: The layer's activations.
        k: Channels of a sub-vector of keys, and bits of its index.
        v: The same for values.
    """
    import mlx.core as mx
    from veloxquant_mlx import (
        apply_dual_transform_keys,
        calibrate_smooth_factors,
        walsh_hadamard_matrix,
    )

    keys = mx.array(one.post_keys(_spread(len(one.keys))))
    smooth = calibrate_smooth_factors(keys)
    hadamard = walsh_hadamard_matrix(keys.shape[-1])
    seen = np.array(apply_dual_transform_keys(keys.swapaxes(0, 1), smooth, hadamard))
    return {
        "head_dim": keys.shape[-1],
        "smooth_factors": np.array(smooth),
        "key_codebook": book(seen, *k, seed=42),
        "value_codebook": book(one.values, *v, seed=43),
    }


def _spread(count: int) -> Any:
    """Positions over a long context, in random order."""
    return np.random.default_rng(0).permutation(count) * POSITIONS // count


def fit_a2ats_documented(samples: Samples, *, code: tuple[int, int]) -> dict[str, Any]:
    """One codebook from all layers' keys; the rotation's base is the model's.

    Args:
        samples: The layers' activations.
        code: Channels of a sub-vector, and bits of its index.
    """
    layers = samples()
    keys = np.concatenate([one.keys for one in layers])
    return {
        "a2ats_rope_base": layers[0].layer.rotary.base,
        "a2ats_codebook": book(keys, *code, seed=42),
    }


def a2ats_layer(one: Any, *, code: tuple[int, int]) -> dict[str, Any]:
    """A layer's own query moment, and its own codebook: of values too, which share it.

    Args:
        one: The layer's activations.
        code: Channels of a sub-vector, and bits of its index.
    """
    import mlx.core as mx
    from veloxquant_mlx.quantizers.a2ats import a2ats_query_second_moment

    queries = mx.array(one.post_queries().reshape(-1, code[0]))
    return {
        "head_dim": one.keys.shape[-1],
        "a2ats_rope_base": one.layer.rotary.base,
        "a2ats_codebook": book(np.concatenate([one.keys, one.values]), *code, seed=42),
        "a2ats_query_h": np.array(a2ats_query_second_moment(queries)),
    }


def comm_vq_layer(one: Any, *, max_samples: int, **config: Any) -> tuple[Any, Any, Any]:
    """A layer, and a fitted quantiser each for its keys and its values."""
    from veloxquant_mlx.quantizers.comm_vq import CommVQQuantizer

    def fitted(rows: Any) -> Any:
        base = one.layer.rotary.base
        quantiser = CommVQQuantizer(d=rows.shape[-1], rope_base=base, **config)
        return quantiser.fit(rows, max_samples=max_samples)

    return one.layer, fitted(one.keys), fitted(one.values)


def comm_vq(model: Any, tables: Sequence[Any], **config: Any) -> Caches:
    """A cache written here around the package's quantiser, which has none of its own."""
    from peer_commvq import EncodeDecodeCache

    return lambda: [EncodeDecodeCache(*layer) for layer in tables]


def of_layers(samples: Samples, *, fit: Callable[[Any], Any]) -> list[Any]:
    """What a function makes of each layer; as many at a time as there are cores."""
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        return list(pool.map(fit, samples()))


def _one_thread() -> None:
    threadpool_limits(1)


def book(rows: Any, width: int, bits: int, *, seed: int) -> Any:
    """A codebook of the package's own training on a seeded draw of sub-vectors.

    Args:
        rows: ``(..., D)`` float32.
        width: Channels of a sub-vector.
        bits: Two to this power entries.
        seed: For the draw and the training.
    """
    import mlx.core as mx
    from veloxquant_mlx import train_codebook

    vectors = np.asarray(rows).reshape(-1, width)
    most = max(VECTORS, VECTORS_AN_ENTRY << bits)
    if len(vectors) > most:
        rng = np.random.default_rng(seed)
        vectors = vectors[rng.choice(len(vectors), most, replace=False)]
    return np.array(train_codebook(mx.array(vectors), n_centroids=2**bits, seed=seed))


# The other peers


def mlx_turboquant(model: Any, tables: None, **config: Any) -> Caches:
    """``make_prompt_cache``, which also wraps the model's attention call."""
    import mlx_turboquant

    return lambda: mlx_turboquant.make_prompt_cache(model, **config)


def turboquant_mlx(model: Any, tables: None, **config: Any) -> Caches:
    """``make_turboquant_cache``."""
    from turboquant_mlx.layers import make_turboquant_cache

    return lambda: make_turboquant_cache(model, **config)
