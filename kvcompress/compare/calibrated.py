"""Calibrations for methods that need one and were given none; for the embedded model alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import field, frozen

from kvcompress.compare.methods import method_of
from kvcompress.compare.report import one_line
from kvcompress.errors import CalibrationRequired, KVCompressError

if TYPE_CHECKING:
    from kvcompress.calibrate.calibration import Calibration
    from kvcompress.calibrate.contract import Progress
    from kvcompress.layers import LayerSpec
    from kvcompress.method import CompressionMethod

KV_HEADS: Final = 3
QUERY_HEADS: Final = 9
HEAD_DIM: Final = 64
ROPE_BASE: Final = 100_000.0


@frozen
class Made:
    """Calibrations that were made for a run.

    Attributes:
        calibration: The tables of all methods that could be fitted, if there are any.
        methods: Words of the methods it is for.
        errors: What went wrong with the others, by the words for them.
    """

    calibration: Calibration | None = None
    methods: frozenset[str] = frozenset()
    errors: Mapping[str, str] = field(factory=dict)


def embedded_layer() -> LayerSpec:
    """A layer of the embedded model; all are alike, and known without loading it."""
    from kvcompress.layers import LayerSpec, Rotary

    return LayerSpec(
        kv_heads=KV_HEADS,
        query_heads=QUERY_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        rotary=Rotary(HEAD_DIM, base=ROPE_BASE),
    )


def lacks_calibration(method: CompressionMethod) -> bool:
    """Whether a method was given no calibration and cannot serve the embedded model without.

    Binding it tells: a method may need one for some of its options only.
    """
    if getattr(method, "calibration", None) is not None:
        return False
    try:
        method.bind(embedded_layer())
    except CalibrationRequired:
        return hasattr(method, "calibration")
    except Exception:  # whatever is wrong with it, a calibration would not help
        return False
    return False


def lacking(words: Iterable[str]) -> dict[str, CompressionMethod]:
    """Those among methods, given by their words, that lack a calibration."""
    found = {}
    for label in words:
        try:
            method = method_of(label)
        except KVCompressError:  # its row says so
            continue
        if lacks_calibration(method):
            found[label] = method
    return found


def make(methods: Mapping[str, CompressionMethod], progress: Progress | None = None) -> Made:
    """Make, or take from the cache folder, what methods lack on the embedded model.

    Args:
        methods: The methods by their words.
        progress: Told of each step.

    Returns:
        One calibration for all. If one method cannot be fitted, the others get theirs.
    """
    from kvcompress.calibrate.demo import demo_calibration

    if not methods:
        return Made()
    try:
        calibration = demo_calibration(list(methods.values()), progress=progress)
        return Made(calibration, frozenset(methods))
    except Exception as error:  # a plugin's fit may raise anything
        errors = dict.fromkeys(methods, one_line(error))
    if len(methods) > 1:  # which of them is it? What can be made is kept, so it is made once
        alone = [make({label: method}, progress) for label, method in methods.items()]
        wrong = {label: text for made in alone for label, text in made.errors.items()}
        good = {label: method for label, method in methods.items() if label not in wrong}
        if len(good) < len(methods):
            rest = make(good, progress)
            return attrs.evolve(rest, errors={**wrong, **rest.errors})
    return Made(errors=errors)


def description(calibration: Calibration) -> dict[str, Any]:
    """What a calibration was made of, for the record."""
    made_of = calibration.provenance
    return {
        "fingerprint": calibration.fingerprint,
        "text": made_of.get("text"),
        "tokens": made_of.get("tokens"),
        "seed": made_of.get("seed"),
        "methods": [f"{fit.key.method} {fit.key.settings}".rstrip() for fit in calibration.fits],
    }
