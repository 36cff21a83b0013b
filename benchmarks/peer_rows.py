"""The rows of ``peers.py``: what is measured, by whose package, and with which options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import peer_adapters as adapters
from attrs import field, frozen
from peer_adapters import Caches, Samples

PLAIN = "mlx-lm KVCache float32"


@frozen
class Subject:
    """One row.

    Attributes:
        label: What the report calls it.
        make: Makes the maker of caches, from the model and the tables.
        fit: Makes the tables, if the row has any.
        config: What was asked for, by the peer's own names.
        package: The distribution on the package index; empty for kvcompress and mlx-lm.
        pin: The version that the adapter was written for.
        note: What a reader must know to judge the row.
    """

    label: str
    make: Callable[[Any, Any], Caches]
    fit: Callable[[Samples], Any] | None = None
    config: dict[str, Any] = field(factory=dict)
    package: str = ""
    pin: str = ""
    note: str = ""

    def version(self) -> str:
        """The installed version; ``ModuleNotFoundError`` says what to do if it is not the pin."""
        if not self.package:
            return ""
        try:
            found = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            found = "nothing"
        if found != self.pin:
            raise ModuleNotFoundError(
                f"this row is for {self.package} {self.pin}, and {found} is installed; run: "
                f"pip install -r benchmarks/peers-requirements.txt"
            )
        return found


def subjects() -> dict[str, Subject]:
    """Every row by label, the plain cache first."""
    rows = [
        Subject(PLAIN, adapters.plain, note="the model's own dtype"),
        Subject("mlx-lm KVCache float16", adapters.half, note="the model computes in float32"),
        *(_quantised(bits) for bits in (8, 4)),
        *(_ours(f"turboquant:bits={bits}") for bits in (4, 3, 2, 1)),
        *(_ours(method) for method in ("a2ats:sub_dim=4", "a2ats")),
        *(_ours(f"{name}:bits={bits}") for name in ("commvq", "vecinfer") for bits in (2, 1)),
        *_velox_scalar_rows(),
        *_velox_vector_rows(),
        *_turboquant_rows(),
        Subject(
            f"{PLAIN}, again",
            adapters.plain,
            note="the first row once more: how much a run drifts",
        ),
    ]
    return {row.label: row for row in rows}


def _quantised(bits: int) -> Subject:
    config = {"bits": bits, "group_size": 64}
    make = partial(adapters.quantised, **config)
    return Subject(f"mlx-lm QuantizedKVCache {bits} bits", make, config=config)


def _ours(method: str) -> Subject:
    return Subject(
        f"kvcompress {method}",
        partial(adapters.ours, method=method),
        partial(adapters.fit_ours, method=method),
    )


def _peer(
    package: str,
    pin: str,
    name: str,
    make: Callable[..., Caches],
    note: str = "",
    fit: Callable[[Samples], Any] | None = None,
    **config: Any,
) -> Subject:
    make = partial(make, **config)
    return Subject(f"{package} {name}", make, fit, config, package=package, pin=pin, note=note)


_velox = partial(_peer, "veloxquant-mlx", "0.94.15")


def _velox_scalar_rows() -> list[Subject]:
    rvq = "nothing to calibrate; values are not coded"
    kivi = "nothing to calibrate; the last 128 tokens are exact"
    return [
        _velox(
            f"{method} b={bits}",
            adapters.velox,
            about,
            method=method,
            bit_width_inlier=bits,
            seed=42,
        )
        for method, about, every in (("turboquant_rvq", rvq, (2, 1)), ("kivi", kivi, (4, 2)))
        for bits in every
    ]


def _velox_vector_rows() -> list[Subject]:
    return [
        _vecinfer("calibrated 2 bits", (4, 8), (4, 8)),
        _vecinfer("calibrated 1 bit", (8, 8), (8, 8)),
        _vecinfer("documented", (4, 12), (8, 8), adapters.fit_vecinfer_documented),
        _a2ats("calibrated 2 bits", (4, 8)),
        _a2ats("calibrated 1 bit", (8, 8)),
        _a2ats("documented", (8, 8), adapters.fit_a2ats_documented),
        _comm_vq("2 bits (adapter)", 16),
        _comm_vq("1 bit (adapter)", 8),
    ]


def _calibrated(
    name: str, layer: Callable[..., Any], one: Callable[..., Any] | None, **sizes: Any
) -> Callable[..., Subject]:
    """A row with tables: a layer's own, or the same for all layers where ``one`` makes them."""
    if one:
        note = "documented recipe: one codebook for all layers"
        return partial(_velox, name, adapters.velox, note, partial(one, **sizes))
    note = "a codebook a layer from the model's activations"
    fit = partial(adapters.of_layers, fit=partial(layer, **sizes))
    return partial(_velox, name, adapters.velox_layers, note, fit)


def _vecinfer(
    name: str,
    k: tuple[int, int],
    v: tuple[int, int],
    one: Callable[..., Any] | None = None,
) -> Subject:
    return _calibrated(f"vecinfer {name}", adapters.vecinfer_layer, one, k=k, v=v)(
        method="vecinfer",
        key_sub_dim=k[0],
        key_codebook_bits=k[1],
        value_sub_dim=v[0],
        value_codebook_bits=v[1],
    )


def _a2ats(name: str, code: tuple[int, int], one: Callable[..., Any] | None = None) -> Subject:
    return _calibrated(f"a2ats {name}", adapters.a2ats_layer, one, code=code)(
        method="a2ats",
        a2ats_window=128,
        a2ats_sub_dim=code[0],
        a2ats_codebook_bits=code[1],
    )


def _comm_vq(name: str, books: int) -> Subject:
    # More vectors than the defaults of 8,192 and 50 rounds take, and fewer rounds: on tokens held
    # out this errs no more, and takes a fourth of the time.
    config = {"n_codebooks": books, "b": 8, "n_em_iters": 8, "max_samples": 16384}
    return _velox(
        f"comm_vq {name}",
        adapters.comm_vq,
        "encode-decode adapter: the package has no cache for this quantiser. Keys are un-rotated "
        "before encoding; values are coded at position 0, where nothing is rotated",
        partial(adapters.of_layers, fit=partial(adapters.comm_vq_layer, **config)),
        **config,
    )


def _turboquant_rows() -> list[Subject]:
    small = partial(_peer, "mlx-turboquant", "0.0.2", make=adapters.mlx_turboquant)
    full = partial(_peer, "turboquant-mlx-full", "0.30.0", make=adapters.turboquant_mlx)
    first = {"min_tokens_before_quant": 128}
    return [
        small(name="4 bits", kv_bits=4, kv_group_size=64),
        small(
            name="3 bits qjl",
            note="the kernel for its added bit runs on Metal alone",
            kv_bits=3,
            kv_group_size=64,
            qjl=True,
        ),
        full(name="K8 V3", note="the documented default", k_bits=8, v_bits=3),
        full(name="4 bits", tq_bits=4),
        full(name="4 bits, first 128 exact", tq_bits=4, **first),
        full(name="3 bits", tq_bits=3),
    ]
