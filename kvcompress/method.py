"""What a compression method is: the contract, its description, and an optional base class."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import attrs
from attrs import field, frozen

from kvcompress.config import config_dict, integer, pair, to_json
from kvcompress.config.option import owner_name, shown
from kvcompress.errors import ConfigError

if TYPE_CHECKING:
    from kvcompress.codec import KVCodec
    from kvcompress.layers import LayerSpec

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_TARGET = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


def _one_line(info: MethodInfo, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise ConfigError(f"MethodInfo: {attribute.name} must be one line (got {shown(value)})")


def _line_or_nothing(info: MethodInfo, attribute: attrs.Attribute[str], value: str) -> None:
    if value != "":
        _one_line(info, attribute, value)


def _truth(info: MethodInfo, attribute: attrs.Attribute[bool], value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(
            f"MethodInfo: {attribute.name} must be true or false (got {shown(value)})"
        )


def _count(info: MethodInfo, attribute: attrs.Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"MethodInfo: {attribute.name} must be an integer of at least 1 (got {shown(value)})"
        )


def _matches(pattern: re.Pattern[str], legal: str) -> Any:
    def check(info: MethodInfo, attribute: attrs.Attribute[str], value: str) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ConfigError(f"MethodInfo: {attribute.name} must be {legal} (got {shown(value)})")

    return check


def _words(value: Iterable[str]) -> frozenset[str]:
    words = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(f"MethodInfo: capabilities must be a set of words (got {shown(value)})")
    return frozenset(str(word) for word in words)


@frozen
class MethodInfo:
    """The light description of a method, known before its code is imported.

    Attributes:
        name: The method's name: lower-case letters, digits, ``_``, ``-`` and ``.``.
        summary: One line.
        target: Where the class stands, as ``"module:attribute"``.
        paper: Title and address of the paper, or empty.
        needs_calibration: Whether the method usually needs a calibration file.
        capabilities: Words for what the method can do, which tests and tools go by.
        api_version: The version of the plugin API the method was written for.
    """

    name: str = field(validator=_matches(_NAME, "lower-case letters, digits, '_', '-' or '.'"))
    summary: str = field(validator=_one_line)
    target: str = field(validator=_matches(_TARGET, "'module:attribute'"))
    paper: str = field(default="", validator=_line_or_nothing, kw_only=True)
    needs_calibration: bool = field(default=False, validator=_truth, kw_only=True)
    capabilities: frozenset[str] = field(default=frozenset(), converter=_words, kw_only=True)
    # The version that plugins which do not say were written for: stays 1 in later versions.
    api_version: int = field(default=1, validator=_count, kw_only=True)


@runtime_checkable
class CompressionMethod(Protocol):
    """The contract of a method: a configured, immutable value that codes a layer's cache.

    The cache keeps the first ``sinks`` tokens and the last ``window`` ones exact, leaves the layers
    in ``skip_layers`` alone, and hands the rest, ``block`` tokens at a time, to the codec that
    :meth:`bind` returns. :class:`Method` gives everything but ``name`` and ``bind``.
    """

    @property
    def name(self) -> str:
        """The name that the method is registered under."""

    @property
    def window(self) -> int:
        """How many of the last tokens stay exact."""

    @property
    def sinks(self) -> int:
        """How many of the first tokens stay exact."""

    @property
    def skip_layers(self) -> tuple[int, int]:
        """How many of the first and of the last layers stay exact."""

    @property
    def block(self) -> int:
        """How many tokens are coded at a time."""

    @property
    def fingerprint(self) -> str:
        """A digest of the name, the configuration and the calibration."""

    def config(self) -> dict[str, Any]:
        """Return the options by name as JSON values."""

    def bind(self, layer: LayerSpec) -> KVCodec:
        """Return the codec for one layer; pure, so equal layers give equal codecs."""

    def make_cache(self, model: Any) -> list[Any]:
        """Return one cache for each layer of ``model``, for ``prompt_cache=``."""


def calibration_field() -> Any:
    """Declare that a method takes a calibration: the object, or the path of its file."""
    return field(
        default=None,
        converter=attrs.Converter(_loaded, takes_self=True),
        eq=lambda calibration: getattr(calibration, "fingerprint", None),
    )


def _loaded(calibration: Any, method: object) -> Any:
    if isinstance(calibration, str | PathLike):
        from kvcompress.calibrate.file import load_calibration

        return load_calibration(calibration)
    if calibration is None or isinstance(getattr(calibration, "fingerprint", None), str):
        return calibration
    raise ConfigError(
        f"{owner_name(type(method))}: calibration must be a Calibration or the path of its file "
        f"(got {shown(calibration)})"
    )


@frozen(kw_only=True)
class Method(ABC):
    """Optional base of methods: the options that every method has, and what follows from them.

    A subclass names itself (``name: ClassVar[str] = "example"``), declares its options with the
    helpers of :mod:`kvcompress.config`, and implements :meth:`bind`.
    """

    name: ClassVar[str]

    window: int = integer(
        128,
        help="Most recent tokens kept exact; 0 or less codes everything outside the current chunk.",
    )
    sinks: int = integer(4, low=0, help="First tokens kept exact.")
    skip_layers: tuple[int, int] = pair(
        0, low=0, help="First and last layers left exact: one number for both ends, or a pair."
    )
    block: int = integer(32, choices=(16, 32, 64, 128), help="Tokens coded at a time.")

    def __attrs_post_init__(self) -> None:
        self.check()

    def check(self) -> None:  # noqa: B027
        """Check the options together; a subclass raises :func:`kvcompress.config.illegal`."""

    @abstractmethod
    def bind(self, layer: LayerSpec) -> KVCodec:
        """Return the codec for one layer; pure, so equal layers give equal codecs.

        Raises:
            ConfigError: The layer's shape does not fit the options.
            CalibrationRequired: The method needs a calibration and was given none.
            CalibrationMismatch: The calibration was made for another layer.
        """

    def config(self) -> dict[str, Any]:
        """Return the options by name as JSON values; an array as its digest."""
        return config_dict(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the name, the canonical configuration and the calibration's fingerprint."""
        calibration = getattr(getattr(self, "calibration", None), "fingerprint", "")
        return hashlib.sha256(f"{self.name}\n{to_json(self)}\n{calibration}".encode()).hexdigest()

    def make_cache(self, model: Any) -> list[Any]:
        """Return one cache for each layer of ``model``, for ``prompt_cache=``."""
        from kvcompress.cache import make_cache

        return make_cache(self, model)
