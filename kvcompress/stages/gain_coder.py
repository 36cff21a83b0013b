"""Rows coded as a gain and the codes of their direction: TurboQuant's MSE code, and its kin."""

from __future__ import annotations

from typing import get_args

import mlx.core as mx
from attrs import field, frozen

from kvcompress.errors import ConfigError
from kvcompress.schema import Field
from kvcompress.stages.base import Fields, Quantiser
from kvcompress.stages.gain import GainForm, corrected, decode_gain, encode_gain, row_gain
from kvcompress.stages.plane import Plane, plane_field, plane_of, write


def check_form(owner: str, form: GainForm) -> None:
    """Refuse a form of gain that does not exist.

    Raises:
        ConfigError: Naming the forms.
    """
    if form not in get_args(GainForm):
        legal = ", ".join(map(repr, get_args(GainForm)))
        raise ConfigError(f"{owner}: form must be one of {legal} (got {form!r})")


@frozen
class GainCoder:
    """``z ~ gain * levels[codes]`` (TurboQuant, arXiv 2504.19874, algorithm 1).

    Fields: ``codes``, packed words; ``gain``, uint16 (:mod:`kvcompress.stages.gain`).

    Attributes:
        quantiser: Codes rows of root mean square 1.
        heads: Heads of a layer, ``H``.
        form: What the stored gain makes exact; it costs no bits.
    """

    quantiser: Quantiser
    heads: int
    form: GainForm = "matched"
    _plane: Plane = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        check_form("GainCoder", self.form)
        object.__setattr__(self, "_plane", plane_of(self.quantiser))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Codes and gain."""
        return (
            plane_field("codes", self.quantiser, self.heads),
            Field("gain", "uint16", 1, self.heads),
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of the quantiser's tables."""
        return self.quantiser.table_bytes

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        """``(B, H, T, D)`` float32 to codes and gain."""
        gain, unit = row_gain(z)
        codes = write(self.quantiser, unit)
        if self.form != "raw":
            gain = corrected(gain, unit, self._plane.decode(codes), self.form)
        return {"codes": codes, "gain": encode_gain(gain)}

    def decode(self, fields: Fields) -> mx.array:
        """Stored fields to ``(B, H, T, D)`` float32."""
        return self._plane.decode(fields["codes"]) * decode_gain(fields["gain"])

    def scores(self, q: mx.array, fields: Fields) -> mx.array:
        """``q . z`` from the codes: ``(B, H, M, D)`` to ``(B, H, M, T)``."""
        return self._plane.scores(q, fields["codes"], decode_gain(fields["gain"]))

    def mix(self, weights: mx.array, fields: Fields) -> mx.array:
        """``p @ z`` from the codes: ``(B, H, M, T)`` to ``(B, H, M, D)``."""
        return self._plane.mix(weights, fields["codes"], decode_gain(fields["gain"]))
