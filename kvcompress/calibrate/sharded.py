"""The part of a calibration that one rank of a tensor-parallel model needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from kvcompress.calibrate.contract import Tables
from kvcompress.config.option import shown
from kvcompress.errors import BrokenPlugin, ConfigError
from kvcompress.layers import LayerSpec

if TYPE_CHECKING:
    from kvcompress.calibrate.calibration import Calibration, Fit
    from kvcompress.calibrate.samples import LayerMoments


def heads_of(layer: LayerSpec, rank: int, size: int) -> slice:
    """Which KV heads of a layer a rank holds.

    mlx-lm gives each rank as many neighbouring rows of the projections. Where there are fewer
    heads than ranks, neighbouring ranks hold copies of one.

    Raises:
        ConfigError: The heads cannot be dealt out evenly.
    """
    count = layer.kv_heads
    if layer.query_heads % size or (count % size and size % count):
        raise ConfigError(
            f"calibration: {count} KV heads and {layer.query_heads} query heads of layer "
            f"{layer.index} cannot be dealt out to {size} ranks"
        )
    first = rank * count // size
    return slice(first, first + max(count // size, 1))


def shard_layer(layer: LayerSpec, rank: int, size: int) -> LayerSpec:
    """A layer as one rank has it.

    Raises:
        ConfigError: As :func:`heads_of`.
    """
    heads = heads_of(layer, rank, size)
    held = heads.stop - heads.start
    return attrs.evolve(layer, kv_heads=held, query_heads=layer.query_heads // size)


def sharded(calibration: Calibration, rank: int, size: int) -> Calibration:
    """The layers, moments and tables of one rank's heads: copies, which hold on to nothing else.

    Args:
        calibration: Of the whole model.
        rank: The rank, from 0.
        size: How many there are.

    Raises:
        ConfigError: There is no such rank, the heads cannot be dealt out, the calibration is a
            part already, or a method's tables cannot be divided.
        BrokenPlugin: A table that is declared to be by head is not.
    """
    _check(calibration, rank, size)
    if size == 1:
        return calibration
    heads = {layer.index: heads_of(layer, rank, size) for layer in calibration.layers}
    moments = zip(calibration.layers, calibration.recorded, strict=True)
    return attrs.evolve(
        calibration,
        layers=tuple(shard_layer(layer, rank, size) for layer in calibration.layers),
        recorded=tuple(_moments(one, heads[layer.index]) for layer, one in moments),
        fits=[_fit(fit, calibration.layers, heads) for fit in calibration.fits],
        provenance={**calibration.provenance, "shard": [rank, size]},
    )


def _check(calibration: Calibration, rank: int, size: int) -> None:
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (rank, size))
    if not whole or not 0 <= rank < size:
        raise ConfigError(
            f"calibration: shard takes a rank from 0 and how many there are "
            f"(got {shown(rank)}, {shown(size)})"
        )
    held = calibration.provenance.get("shard")
    if held:
        raise ConfigError(
            f"calibration: it is of rank {held[0]} of {held[1]} already; shard the whole one"
        )


def _moments(moments: LayerMoments, heads: slice) -> LayerMoments:
    arrays: dict[str, Any] = {
        name: value[heads].copy()
        for name, value in attrs.asdict(moments, recurse=False).items()
        if isinstance(value, np.ndarray)
    }
    return attrs.evolve(moments, **arrays)


def _fit(fit: Fit, layers: tuple[LayerSpec, ...], heads: Mapping[int, slice]) -> Fit:
    by_head = fit.head_tables
    if by_head is None:
        raise ConfigError(
            f"calibration: the tables of {fit.key.method} cannot be divided by KV heads, since it "
            f"does not declare head_tables; calibrate the sharded model on every rank, or leave "
            f"the method out: calibration.subset(methods)"
        )
    counts = {layer.index: layer.kv_heads for layer in layers}

    def part(index: int, name: str, table: NDArray[Any]) -> NDArray[Any]:
        if name not in by_head or len(table) == 1:  # what heads share has a leading axis of 1
            return table
        if len(table) != counts[index]:
            raise BrokenPlugin(
                f"{fit.key.method}: head_tables names {name!r}, whose leading axis must be 1 or "
                f"the {counts[index]} KV heads of layer {index} (got {len(table)})"
            )
        return table[heads[index]].copy()

    tables: dict[int, Tables] = {
        index: {name: part(index, name, table) for name, table in held.items()}
        for index, held in fit.tables.items()
    }
    return attrs.evolve(fit, tables=tables)
