"""Configurations as JSON: canonical text, so that equal configurations have equal text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from kvcompress.config.describe import construct, options_of, unknown_option
from kvcompress.config.option import owner_name
from kvcompress.errors import ConfigError

T = TypeVar("T")


def config_dict(config: object) -> dict[str, Any]:
    """Return the options of ``config`` by name as JSON values; an array as its digest."""
    return {
        option.name: option.encode(getattr(config, option.name))
        for option in options_of(type(config))
    }


def to_json(config: object) -> str:
    """Return :func:`config_dict` as canonical JSON: sorted keys, no blanks, ASCII."""
    return json.dumps(config_dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(cls: type[T], text: str, arrays: Mapping[str, Any] | None = None) -> T:
    """Make a ``cls`` from what :func:`to_json` wrote.

    Args:
        cls: The class of the configuration.
        text: A JSON object of options; those it leaves out keep their default.
        arrays: The arrays whose digests stand in ``text``, by the name of the option.

    Raises:
        ConfigError: The text is no JSON object, an option is unknown or not legal, or an array is
            missing or is not the one whose digest was stored.
    """
    owner = owner_name(cls)
    try:
        stored = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{owner}: the configuration is not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{owner}: the configuration must be a JSON object (got {text[:60]!r})")
    known = {option.name: option for option in options_of(cls)}
    values = {}
    for name, data in stored.items():
        if name not in known:
            raise unknown_option(owner, name, known)
        if name in (arrays or {}):
            values[name] = known[name].check((arrays or {})[name], owner=owner)
            if known[name].encode(values[name]) != data:
                raise ConfigError(f"{owner}: {name} is not the array that was stored")
        else:
            values[name] = known[name].decode(data, owner=owner)
    return construct(cls, values)
