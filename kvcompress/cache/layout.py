"""Whether arrays from outside are laid out as a layer's cache holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
from attrs import frozen

from kvcompress.cache.store import SEAL, ExactRows
from kvcompress.layers import LayerSpec
from kvcompress.schema import Schema


@frozen
class _Place:
    """An array, and what it must be: ``(B, heads, T, width)`` with ``T`` from least to most."""

    name: str
    array: object
    dtype: str
    heads: int
    width: int
    least: int
    most: int | None = None


def misfit_of(
    layer: LayerSpec,
    schema: Schema,
    exact: ExactRows,
    constants: Mapping[str, mx.array],
    runs: Sequence[Mapping[str, mx.array]],
    tail: int,
) -> str:
    """What is wrong with a cache's arrays, in words; empty where all is well.

    Args:
        layer: The layer.
        schema: Of the layer's codec.
        exact: The exact rows.
        constants: What the sequence keeps once.
        runs: Runs of codes: full ones, then the one being filled.
        tail: Tokens of the run being filled; 0 where there is none.
    """
    known = {field.name for field in schema.constants}
    if not {*constants} <= known:
        return f"constants are foreign ({', '.join(map(str, constants))})"
    if runs and {*constants} != known:
        return f"constants are missing ({', '.join(sorted(known - {*constants}))})"
    batches = set()
    for place in _places(layer, schema, exact, constants, runs, tail):
        wrong = _wrong(place)
        if wrong:
            return f"{place.name} {wrong}"
        if isinstance(place.array, mx.array):
            batches.add(place.array.shape[0])
    if len(batches) > 1:
        return f"arrays are of batches of {', '.join(map(str, sorted(batches)))}"
    return "exact rows are missing" if exact.keys is None and exact.used else ""


def _places(
    layer: LayerSpec,
    schema: Schema,
    exact: ExactRows,
    constants: Mapping[str, mx.array],
    runs: Sequence[Mapping[str, mx.array]],
    tail: int,
) -> Iterator[_Place]:
    heads, used = layer.kv_heads, exact.used
    if exact.keys is not None:
        yield _Place("exact keys", exact.keys, layer.dtype, heads, layer.head_dim, used)
        yield _Place("exact values", exact.values, layer.dtype, heads, layer.value_dim, used)
    if exact.received is not None:
        yield _Place("received attention", exact.received, "float32", 1, 1, used, used)
    for field in schema.constants:
        if field.name in constants:
            array = constants[field.name]
            yield _Place(field.name, array, field.dtype, field.heads, field.width, 1, 1)
    for number, run in enumerate(runs):
        filling = tail and number == len(runs) - 1
        least, most = (tail, None) if filling else (SEAL, SEAL)
        for field in schema.fields:
            array = run[field.name]
            yield _Place(field.name, array, field.dtype, field.heads, field.width, least, most)


def _wrong(place: _Place) -> str:
    array = place.array
    if not isinstance(array, mx.array):
        return f"must be an array (got a {type(array).__name__})"
    kind = str(array.dtype).removeprefix("mlx.core.")
    tokens = f"{place.least}" if place.most is not None else f"{place.least} or more"
    fits = (
        array.ndim == 4
        and (array.shape[1], array.shape[3]) == (place.heads, place.width)
        and place.least <= array.shape[2]
        and (place.most is None or array.shape[2] <= place.most)
    )
    if fits and kind == place.dtype:
        return ""
    return (
        f"must be {place.dtype} of shape (B, {place.heads}, {tokens}, {place.width}) "
        f"(got {kind} of {tuple(array.shape)})"
    )
