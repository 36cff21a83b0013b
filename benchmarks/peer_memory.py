"""Bytes of any package's caches, with and without what they hold before their first token.

Packages differ in where codebooks and rotations lie: in each cache, in a shared codec, in the
program's constants. What exists before the first token is called tables for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from kvcompress.cache import report
from kvcompress.compare.memory import held
from kvcompress.compare.metrics import Measures


@frozen
class Fresh:
    """What caches that have seen nothing take.

    Attributes:
        own: Bytes of arrays in the caches.
        shared: Bytes of arrays in what caches share.
        active: What MLX had in use for them, beyond the model.
        empty: What it had in use without them.
    """

    own: int
    shared: int
    active: int
    empty: int

    def apart(self, measures: Measures, readings: Measures, before: int) -> Measures:
        """Take tables out of what was counted, and name them.

        Args:
            measures: What the evaluator counted by walking.
            readings: What MLX said, beyond ``before``.
            before: What MLX had in use before the first window: the model, and tables that
                outlive a sequence.

        Returns:
            The measures; bytes without tables, and under ``..._with_tables`` all of them.
        """
        resident, tables = measures["resident_bytes"] - self.own, self.own + self.shared
        values = measures["fp16_bytes"] / 2
        beyond = before - self.empty
        active, peak = (beyond + readings[name] for name in ("active_bytes", "peak_bytes"))
        return {
            **measures,
            "resident_bytes": resident,
            "table_bytes": tables,
            "bits_per_value": 8 * resident / values,
            "bits_per_value_with_tables": 8 * (resident + tables) / values,
            "times_smaller": 2 * values / resident,
            "active_bytes": active - self.active,
            "active_bytes_with_tables": active,
            "peak_bytes": peak - self.active,
            "peak_bytes_with_tables": peak,
        }


def coded_bits(caches: Sequence[Any], measures: Measures) -> float:
    """Bits that a coded number takes, which a package may not really keep.

    Args:
        caches: Used caches.
        measures: What was counted of them, which has kvcompress's own number.

    Returns:
        What the package states; where it states nothing, what it keeps of a number, coded or not,
        without room for tokens to come.
    """
    ours = measures.get("coded_bits_per_value")
    stated = [getattr(cache, "assigned_avg_bits", None) for cache in caches]
    if ours:
        return ours
    if all(isinstance(bits, int | float) for bits in stated):
        return float(sum(stated) / len(stated))
    return 16 * held_bytes(caches) / (measures["fp16_bytes"] or 1)


def held_bytes(caches: Sequence[Any]) -> int:
    """What caches of any kind hold of their tokens, without room for tokens to come."""
    counted = report(caches)
    if counted.layers:
        return counted.stored_bytes + counted.plain_bytes
    return sum(int(array.nbytes) for array in held(caches))
