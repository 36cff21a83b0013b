"""One suite for every registered method."""

from __future__ import annotations

import re

from kvcompress.testing.conformance import MethodConformance


def suites(module: str) -> dict[str, type[MethodConformance]]:
    """A suite for each method that is installed and works, by the name of its class.

    Put them into a test module for pytest to find::

        globals().update(suites(__name__))

    Args:
        module: The name of the module that they go into.
    """
    from kvcompress.registry import list_methods

    found = {}
    for row in list_methods():
        if row.status == "ok":
            words = re.split(r"\W+", row.name)
            name = "Test" + "".join(word[:1].upper() + word[1:] for word in words)
            body = {"method": row.name, "__module__": module, "__doc__": row.summary}
            found[name] = type(name, (MethodConformance,), body)
    return found
