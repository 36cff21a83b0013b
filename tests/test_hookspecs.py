from __future__ import annotations

import pluggy
import pytest

from kvcompress import hookspecs


def test_the_hooks_are_those_documented() -> None:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    hooks = {name for name in vars(manager.hook) if name.startswith("kvcompress_")}
    assert hooks == {"kvcompress_register", "kvcompress_metrics", "kvcompress_workloads"}
    assert all(getattr(hookspecs, name).__doc__ for name in hooks)


def test_registration_reaches_plugins_that_come_later() -> None:
    class Late:
        @hookspecs.hookimpl
        def kvcompress_register(self, registry: list[int]) -> None:
            registry.append(1)

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    seen: list[int] = []
    manager.hook.kvcompress_register.call_historic(kwargs={"registry": seen})
    manager.register(Late())
    assert seen == [1]


def test_a_hook_with_a_foreign_argument_is_refused() -> None:
    class Wrong:
        @hookspecs.hookimpl
        def kvcompress_metrics(self, nothing: int) -> dict[str, int]:
            return {}

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    with pytest.raises(pluggy.PluginValidationError):
        manager.register(Wrong())
