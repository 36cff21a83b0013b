"""What the installed distributions say they offer, read from their metadata without importing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import metadata

from attrs import field, frozen

METHODS_GROUP = "kvcompress.methods"
ADDONS_GROUP = "kvcompress.plugins"


@frozen
class Offer:
    """One distribution's claim to offer something under a name.

    Attributes:
        name: The entry point's name.
        distribution: The name of the distribution, in its canonical form.
        version: The version of the distribution.
        value: What the entry point points to; offers of the same plugin share it.
        load: Import and return the plugin.
    """

    name: str
    distribution: str
    version: str
    value: str
    load: Callable[[], object] = field(repr=False)

    @property
    def selector(self) -> str:
        """The name that chooses this offer among several."""
        return f"{self.distribution}:{self.name}"

    @property
    def origin(self) -> str:
        """The distribution and its version."""
        return f"{self.distribution} {self.version}".strip()


def canonical(distribution: str) -> str:
    """Return the form in which names of distributions are compared."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def find_offers(group: str) -> tuple[Offer, ...]:
    """Return the offers of all installed distributions in an entry-point group."""
    found: dict[str, list[Offer]] = {}
    for distribution in metadata.distributions():
        offers = list(_offers_of(distribution, group))
        if offers:
            # Of two copies of a distribution, an import finds the first one on the path.
            found.setdefault(offers[0].distribution, offers)
    return tuple(offer for offers in found.values() for offer in offers)


def _offers_of(distribution: metadata.Distribution, group: str) -> Iterator[Offer]:
    try:
        points = tuple(distribution.entry_points.select(group=group))
    except Exception as error:
        if group in (distribution.read_text("entry_points.txt") or ""):
            name, version = _identity(distribution)
            yield Offer(name, name, version, f"entry_points.txt of {name}", _raiser(error))
        return
    if points:
        name, version = _identity(distribution)
        for point in points:
            yield Offer(point.name, name, version, point.value, point.load)


def _identity(distribution: metadata.Distribution) -> tuple[str, str]:
    try:
        fields = distribution.metadata
        return canonical(fields["Name"]), fields["Version"] or ""
    except Exception:
        # Leftovers of an interrupted installation have no readable metadata.
        return "unknown", ""


def _raiser(error: Exception) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load
