from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcompress import MethodInfo, hookimpl
from kvcompress.registry import Registrar
from kvcompress.registry.plugins import PluginLoader

INFO = MethodInfo("toy", "A toy.", "toys:Toy")


def plugin(*infos: Any) -> Any:
    def kvcompress_register(registry: Registrar) -> None:
        for info in infos:
            registry.add(info)

    return SimpleNamespace(kvcompress_register=hookimpl(kvcompress_register))


def test_a_plugin_is_loaded_once() -> None:
    loader = PluginLoader()
    made = plugin(INFO)
    calls: list[int] = []

    def source() -> Any:
        calls.append(1)
        return made

    assert loader.load("toy", source).infos == {"toy": INFO}
    assert loader.load("toy", source) is loader.load("toy", source)
    assert calls == [1]


def test_what_a_failing_plugin_offered_is_not_given_to_the_next() -> None:
    loader = PluginLoader()
    failed = loader.load("bad", lambda: plugin(INFO, "no info"))
    assert isinstance(failed.error, TypeError)
    assert loader.load("empty", lambda: plugin()).infos == {}


def test_a_failing_plugin_leaves_no_hook_behind() -> None:
    def kvcompress_metrics() -> dict[str, Any]:
        return {"m": len}

    bad = plugin("no info")
    bad.kvcompress_metrics = hookimpl(kvcompress_metrics)
    loader = PluginLoader()
    assert loader.load("bad", lambda: bad).error is not None
    assert loader.hook.kvcompress_metrics() == []


def test_a_registrar_refuses_the_same_name_twice() -> None:
    registrar = Registrar()
    registrar.add(INFO)
    with pytest.raises(ValueError, match="registers 'toy' twice"):
        registrar.add(INFO)
    assert registrar.take() == {"toy": INFO}
    assert registrar.take() == {}
