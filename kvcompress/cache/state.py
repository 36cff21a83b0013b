"""A cache's state as mlx-lm keeps it: a JSON header, then arrays, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import attrs
import mlx.core as mx

from kvcompress.cache.binding import bound
from kvcompress.cache.layout import misfit_of
from kvcompress.cache.store import CodeStore, ExactRows
from kvcompress.errors import CacheFileError
from kvcompress.layers import LayerSpec, Rotary

if TYPE_CHECKING:
    from kvcompress.cache.kvcache import CompressedKVCache
    from kvcompress.codec import KVCodec
    from kvcompress.method import CompressionMethod

FORMAT = 1
State = tuple[Any, ...]

# Methods and codecs in use: a state taken in this process needs neither plugin nor calibration.
_methods: WeakValueDictionary[str, CompressionMethod] = WeakValueDictionary()
_codecs: WeakValueDictionary[str, KVCodec] = WeakValueDictionary()


def _identity(cache: CompressedKVCache) -> dict[str, Any]:
    """What tells which codec reads the arrays."""
    return {
        "format": FORMAT,
        "method": cache.method.name,
        "config": cache.method.config(),
        "fingerprint": cache.method.fingerprint,
        "layer": attrs.asdict(cache.layer),
    }


def _key(identity: dict[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def pack_state(cache: CompressedKVCache) -> State:
    """Header and arrays of a cache, as they are held."""
    cache.come_to_rest()
    identity = _identity(cache)
    key = _key(identity)
    _methods[key], _codecs[key] = cache.method, cache.codec
    return _packed(identity, cache, cache.exact, cache.store)


def compact_state(cache: CompressedKVCache) -> State:
    """The same without room to grow, for a file."""
    cache.come_to_rest()
    return _packed(_identity(cache), cache, cache.exact.without_room(), cache.store.without_room())


def _packed(
    identity: dict[str, Any], cache: CompressedKVCache, exact: ExactRows, store: CodeStore
) -> State:
    counts = {
        "offset": cache.offset,
        "exact": exact.used,
        "exact_arrays": len(list(exact.arrays())),
        "constants": sorted(cache.constants),
        "sealed": len(store.sealed),
        "tail": store.used,
    }
    constants = [cache.constants[name] for name in sorted(cache.constants)]
    header = json.dumps({"identity": identity, "counts": counts}, sort_keys=True)
    return (header, *exact.arrays(), *constants, *store.arrays())


def unpack_state(cache: CompressedKVCache, state: State) -> None:
    """Put a state into a cache of the same method, configuration and layer.

    Raises:
        CacheFileError: Where it is of another.
    """
    header = _parse(state)
    theirs, ours = header["identity"], json.loads(_key(_identity(cache)))
    different = sorted(k for k in ours if theirs.get(k) != ours[k])
    if different == ["fingerprint"]:
        raise CacheFileError(_another_version(theirs, cache.method))
    if different:
        got = {k: theirs.get(k) for k in different}
        raise CacheFileError(
            f"{cache.method.name}: layer {cache.layer.index}: the state differs in "
            f"{', '.join(different)} (got {got})"
        )
    _fill(cache, header["counts"], list(state[1:]))


def restore(state: State) -> CompressedKVCache:
    """A cache from a state alone; the method is looked up and bound again where need be.

    Raises:
        CacheFileError: Where the state is foreign, or the method would now code differently.
    """
    from kvcompress.cache.kvcache import CompressedKVCache
    from kvcompress.registry import get_method

    header = _parse(state)
    identity = header["identity"]
    key = _key(identity)
    method = _methods.get(key) or get_method(identity["method"], **identity["config"])
    if method.fingerprint != identity["fingerprint"]:
        raise CacheFileError(_another_version(identity, method))
    layer = _layer_of(identity["layer"])
    cache = CompressedKVCache(method, layer, _codecs.get(key) or bound(method, layer))
    _fill(cache, header["counts"], list(state[1:]))
    return cache


def _another_version(identity: dict[str, Any], method: CompressionMethod) -> str:
    return (
        f"{method.name}: the state was made with another calibration or version of the method "
        f"(fingerprint {identity['fingerprint'][:12]}, now {method.fingerprint[:12]})"
    )


def _layer_of(fields: dict[str, Any]) -> LayerSpec:
    try:
        rest = dict(fields)
        rotary = rest.pop("rotary")
        return LayerSpec(rotary=None if rotary is None else Rotary(**rotary), **rest)
    except (TypeError, ValueError, KeyError) as error:
        raise CacheFileError(f"the state is of a layer that cannot be ({error})") from error


def _parse(state: State) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(state[0])
        known = header["identity"]["format"] == FORMAT
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise CacheFileError("the state is not one of a kvcompress cache") from error
    if not known:
        raise CacheFileError(
            f"the state has format {header['identity']['format']}; this version reads {FORMAT}"
        )
    if not _complete(header):
        raise CacheFileError("the state is not one of a kvcompress cache: its header is damaged")
    return header


def _complete(header: dict[str, Any]) -> bool:
    """Whether a header has all that is read from it."""
    identity, counts = header["identity"], header.get("counts")
    kinds = {"method": str, "config": dict, "fingerprint": str, "layer": dict}
    if not isinstance(counts, dict) or not isinstance(counts.get("constants"), list):
        return False
    numbers = [counts.get(name) for name in ("offset", "exact", "exact_arrays", "sealed", "tail")]
    return all(isinstance(identity.get(name), kind) for name, kind in kinds.items()) and all(
        type(number) is int and number >= 0 for number in numbers
    )


def _fill(cache: CompressedKVCache, counts: dict[str, Any], arrays: list[mx.array]) -> None:
    """Put checked arrays into a cache, which stays as it was where they do not fit."""
    where = f"{cache.method.name}: layer {cache.layer.index}"
    names = [f.name for f in cache.codec.schema.fields]
    blocks = counts["sealed"] + (1 if counts["tail"] else 0)
    expected = counts["exact_arrays"] + len(counts["constants"]) + blocks * len(names)
    if len(arrays) != expected:
        raise CacheFileError(f"{where}: the state must hold {expected} arrays (got {len(arrays)})")
    rest = iter(arrays)
    exact = ExactRows()
    if counts["exact_arrays"]:
        exact = ExactRows(next(rest), next(rest), counts["exact"])
    if counts["exact_arrays"] > 2:
        exact.received = next(rest)
    constants = {name: next(rest) for name in counts["constants"]}
    runs = [{name: next(rest) for name in names} for _ in range(blocks)]
    misfit = misfit_of(cache.layer, cache.codec.schema, exact, constants, runs, counts["tail"])
    if misfit:
        raise CacheFileError(f"{where}: the state's {misfit}")
    tail = runs.pop() if counts["tail"] else {}
    store = CodeStore(cache.codec.schema, runs, tail, counts["tail"])
    if store.tokens + exact.used != counts["offset"]:
        raise CacheFileError(
            f"{where}: the state's arrays do not hold the {counts['offset']} tokens that its "
            f"header names"
        )
    cache.exact, cache.store, cache.constants = exact, store, constants
    cache.offset = counts["offset"]
