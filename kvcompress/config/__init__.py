"""Declarative options: one declaration gives everything that is known about an option.

A field declared with one of the helpers below is validated when the object is made, documented by
:func:`markdown_table`, read from a command line, written to JSON, and drawn by Hypothesis::

    @frozen(kw_only=True)
    class Example(Method):
        name: ClassVar[str] = "example"
        bits: int = integer(4, low=1, high=8, help="Bits per value.")

Types are strict and nothing is clamped: ``True``, ``4.0``, ``"4"``, ``nan`` and ``None`` are not
integers. A value that is not legal raises :class:`~kvcompress.errors.ConfigError`.
"""

from __future__ import annotations

from kvcompress.config.arrays import array
from kvcompress.config.describe import config_strategy, construct, markdown_table, options_of
from kvcompress.config.option import Option, illegal
from kvcompress.config.scalars import boolean, choice, fraction, integer, number, pair, text
from kvcompress.config.serialise import config_dict, from_json, to_json

__all__ = [
    "Option",
    "array",
    "boolean",
    "choice",
    "config_dict",
    "config_strategy",
    "construct",
    "fraction",
    "from_json",
    "illegal",
    "integer",
    "markdown_table",
    "number",
    "options_of",
    "pair",
    "text",
    "to_json",
]
