"""What ``benchmarks/peers.py`` measures: one function for each way to make a model's caches.

Other packages are driven through their public interfaces only, and imported only when their row
runs. A maker is called once, with the model and a function that gives real activations; what it
returns makes the caches of one new sequence after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
from attrs import field, frozen

Caches = Callable[[], list[Any]]
Samples = Callable[[], Sequence[Any]]
"""Gives each layer's :class:`~kvcompress.calibrate.samples.LayerSamples`."""

VECTORS = 32768
"""Vectors that a codebook of a peer is trained on, at most."""


@frozen
class Subject:
    """One row.

    Attributes:
        label: What the report calls it.
        make: Makes the maker of caches.
        config: What was asked for, by the peer's own names.
        package: The distribution on the package index; empty for kvcompress and mlx-lm.
        pin: The version that the adapter was written for.
        note: What a reader must know to judge the row.
    """

    label: str
    make: Callable[[Any, Samples], Caches]
    config: dict[str, Any] = field(factory=dict)
    package: str = ""
    pin: str = ""
    note: str = ""

    def version(self) -> str:
        """The installed version; ``ModuleNotFoundError`` says what to do if there is none."""
        if not self.package:
            return ""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            raise ModuleNotFoundError(
                f"{self.package} {self.pin} is not installed; run: "
                f"pip install -r benchmarks/peers-requirements.txt"
            ) from None


# mlx-lm's own caches


def plain(model: Any, samples: Samples) -> Caches:
    """The caches that the model makes for itself."""
    from mlx_lm.models.cache import make_prompt_cache

    return lambda: make_prompt_cache(model)


def half(model: Any, samples: Samples) -> Caches:
    """Plain caches that are given float16."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    class HalfKVCache(KVCache):
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            return super().update_and_fetch(keys.astype(mx.float16), values.astype(mx.float16))

    return lambda: [HalfKVCache() for _ in model.layers]


def quantised(model: Any, samples: Samples, *, bits: int, group_size: int) -> Caches:
    """mlx-lm's group quantisation."""
    from mlx_lm.models.cache import QuantizedKVCache

    return lambda: [QuantizedKVCache(group_size=group_size, bits=bits) for _ in model.layers]


# kvcompress


def ours(model: Any, samples: Samples, *, words: str) -> Caches:
    """A method of kvcompress; its calibration is made once and kept in the cache folder."""
    from kvcompress.compare.calibrated import lacking, make
    from kvcompress.compare.methods import method_of
    from kvcompress.errors import KVCompressError

    made = make(lacking([words]))
    if words in made.errors:
        raise KVCompressError(made.errors[words])
    method = method_of(words, made.calibration)
    return lambda: method.make_cache(model)


# veloxquant-mlx


def velox(model: Any, samples: Samples, **config: Any) -> Caches:
    """One configuration for all layers, as the package's quick start does."""
    from veloxquant_mlx import KVCacheBuilder, KVCacheConfig

    return lambda: KVCacheBuilder.for_model(model, KVCacheConfig(**config))


def velox_layers(configs: Sequence[dict[str, Any]]) -> Caches:
    """One configuration a layer."""
    from veloxquant_mlx import KVCacheConfig, KVCacheFactory

    return lambda: [
        KVCacheFactory.create(KVCacheConfig(**config, seed=42 + index))
        for index, config in enumerate(configs)
    ]


def velox_vecinfer_documented(model: Any, samples: Samples, **config: Any) -> Caches:
    """Smooth factors and one codebook each for keys and values, from all layers' activations."""
    import mlx.core as mx
    from veloxquant_mlx import calibrate_smooth_factors

    layers = samples()
    keys = np.concatenate([one.post_keys() for one in layers])
    values = np.concatenate([one.values for one in layers])
    return velox(
        model,
        samples,
        method="vecinfer",
        smooth_factors=calibrate_smooth_factors(mx.array(keys)),
        key_codebook=book(keys, config["key_sub_dim"], config["key_codebook_bits"], 42),
        value_codebook=book(values, config["value_sub_dim"], config["value_codebook_bits"], 43),
        **config,
    )


def velox_vecinfer_calibrated(model: Any, samples: Samples, **config: Any) -> Caches:
    """Each layer its own factors and codebooks, keys transformed as the cache transforms them."""
    import mlx.core as mx
    from veloxquant_mlx import (
        apply_dual_transform_keys,
        calibrate_smooth_factors,
        walsh_hadamard_matrix,
    )

    configs = []
    for one in samples():
        keys = mx.array(one.post_keys())
        smooth = calibrate_smooth_factors(keys)
        hadamard = walsh_hadamard_matrix(keys.shape[-1])
        seen = np.array(apply_dual_transform_keys(keys.swapaxes(0, 1), smooth, hadamard))
        configs.append(
            {
                "method": "vecinfer",
                "head_dim": keys.shape[-1],
                "smooth_factors": smooth,
                "key_codebook": book(seen, config["key_sub_dim"], config["key_codebook_bits"], 42),
                "value_codebook": book(
                    one.values, config["value_sub_dim"], config["value_codebook_bits"], 43
                ),
                **config,
            }
        )
    return velox_layers(configs)


def velox_a2ats_documented(model: Any, samples: Samples, **config: Any) -> Caches:
    """One codebook from all layers' keys; the rotation's base is the model's."""
    layers = samples()
    keys = np.concatenate([one.keys for one in layers])
    return velox(
        model,
        samples,
        method="a2ats",
        a2ats_rope_base=layers[0].layer.rotary.base,
        a2ats_codebook=book(keys, config["a2ats_sub_dim"], config["a2ats_codebook_bits"], 42),
        **config,
    )


def velox_a2ats_calibrated(model: Any, samples: Samples, **config: Any) -> Caches:
    """Each layer its own codebook, from keys and values, and its own query moment."""
    import mlx.core as mx
    from veloxquant_mlx.quantizers.a2ats import a2ats_query_second_moment

    width = config["a2ats_sub_dim"]
    configs = []
    for one in samples():
        rows = np.concatenate([one.keys, one.values])
        queries = one.post_queries().reshape(-1, width)
        configs.append(
            {
                "method": "a2ats",
                "head_dim": one.keys.shape[-1],
                "a2ats_rope_base": one.layer.rotary.base,
                "a2ats_codebook": book(rows, width, config["a2ats_codebook_bits"], 42),
                "a2ats_query_h": a2ats_query_second_moment(mx.array(queries)),
                **config,
            }
        )
    return velox_layers(configs)


def velox_comm_vq(model: Any, samples: Samples, **config: Any) -> Caches:
    """A cache written here around the package's quantiser, which has none of its own."""
    from peer_commvq import EncodeDecodeCache
    from veloxquant_mlx.quantizers.comm_vq import CommVQQuantizer

    limits = {"max_samples": config.pop("max_samples")}
    layers = []
    for one in samples():
        dim = one.keys.shape[-1]
        layers.append(
            (
                one.layer,
                CommVQQuantizer(d=dim, rope_base=one.layer.rotary.base, **config).fit(
                    one.keys, **limits
                ),
                CommVQQuantizer(d=dim, rope_base=one.layer.rotary.base, **config).fit(
                    one.values, **limits
                ),
            )
        )
    return lambda: [EncodeDecodeCache(*layer) for layer in layers]


def book(rows: Any, width: int, bits: int, seed: int) -> Any:
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
    if len(vectors) > VECTORS:
        rng = np.random.default_rng(seed)
        vectors = vectors[rng.choice(len(vectors), VECTORS, replace=False)]
    return train_codebook(mx.array(vectors), n_centroids=2**bits, seed=seed)


# The other peers


def mlx_turboquant(model: Any, samples: Samples, **config: Any) -> Caches:
    """``make_prompt_cache``, which also wraps the model's attention call."""
    import mlx_turboquant

    return lambda: mlx_turboquant.make_prompt_cache(model, **config)


def turboquant_mlx(model: Any, samples: Samples, **config: Any) -> Caches:
    """``make_turboquant_cache``."""
    from turboquant_mlx.layers import make_turboquant_cache

    return lambda: make_turboquant_cache(model, **config)


PLAIN = "mlx-lm KVCache float32"


def subjects() -> dict[str, Subject]:
    """Every row by label, the plain cache first."""
    rows = [
        Subject(PLAIN, plain),
        Subject("mlx-lm KVCache float16", half, note="the model computes in float32"),
        *(
            Subject(
                f"mlx-lm QuantizedKVCache {bits} bits",
                partial(quantised, bits=bits, group_size=64),
                {"bits": bits, "group_size": 64},
            )
            for bits in (8, 4)
        ),
        *(
            Subject(f"kvcompress {words}", partial(ours, words=words))
            for words in (
                "turboquant:bits=4",
                "turboquant:bits=3",
                "turboquant:bits=2",
                "a2ats",
                "a2ats:sub_dim=4",
                "commvq:bits=2",
                "commvq:bits=1",
                "vecinfer:bits=2",
            )
        ),
        *(_velox_rows()),
        *(_turboquant_rows()),
        Subject(f"{PLAIN}, again", plain, note="the first row once more: how much a run drifts"),
    ]
    return {row.label: row for row in rows}


def _peer(
    package: str, pin: str, name: str, make: Callable[..., Caches], note: str, **config: Any
) -> Subject:
    return Subject(
        f"{package} {name}", partial(make, **config), config, package=package, pin=pin, note=note
    )


def _velox_rows() -> list[Subject]:
    row = partial(_peer, "veloxquant-mlx", "0.94.15")
    one = "documented recipe: one codebook for all layers"
    each = "a codebook a layer from the model's activations"
    even = {"key_sub_dim": 4, "key_codebook_bits": 8, "value_sub_dim": 4, "value_codebook_bits": 8}
    told = {"key_sub_dim": 4, "key_codebook_bits": 12, "value_sub_dim": 8, "value_codebook_bits": 8}
    a2ats = {"a2ats_window": 128, "a2ats_sub_dim": 8, "a2ats_codebook_bits": 8}
    adapter = (
        "encode-decode adapter: the package has no cache for this quantiser. Keys are un-rotated "
        "before encoding; values are coded at position 0, where nothing is rotated"
    )
    few = {"b": 8, "n_em_iters": 12, "max_samples": 4096}
    return [
        *(
            row(
                f"turboquant_rvq b={bits}",
                velox,
                "documented recipe; nothing to calibrate; values are not coded",
                method="turboquant_rvq",
                bit_width_inlier=bits,
                seed=42,
            )
            for bits in (1, 2)
        ),
        row("vecinfer calibrated", velox_vecinfer_calibrated, each, **even),
        row("vecinfer documented", velox_vecinfer_documented, one, **told),
        row("a2ats calibrated", velox_a2ats_calibrated, each, **a2ats),
        row("a2ats documented", velox_a2ats_documented, one, **a2ats),
        row("comm_vq 2 bits (adapter)", velox_comm_vq, adapter, n_codebooks=16, **few),
        row("comm_vq 1 bit (adapter)", velox_comm_vq, adapter, n_codebooks=8, **few),
    ]


def _turboquant_rows() -> list[Subject]:
    small = partial(_peer, "mlx-turboquant", "0.0.2")
    full = partial(_peer, "turboquant-mlx-full", "0.30.0")
    return [
        small("4 bits", mlx_turboquant, "", kv_bits=4, kv_group_size=64),
        small("3 bits qjl", mlx_turboquant, "", kv_bits=3, kv_group_size=64, qjl=True),
        full("K8 V3", turboquant_mlx, "the documented default", k_bits=8, v_bits=3),
        full("4 bits", turboquant_mlx, "", tq_bits=4),
        full("3 bits", turboquant_mlx, "", tq_bits=3),
    ]
