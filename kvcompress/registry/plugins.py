"""Loading plugins, each on its own, so that a broken one harms no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pluggy
from attrs import field, frozen

from kvcompress import hookspecs
from kvcompress.method import MethodInfo


class Registrar:
    """What a plugin's ``kvcompress_register`` hook receives."""

    def __init__(self) -> None:
        self._infos: dict[str, MethodInfo] = {}

    def add(self, info: MethodInfo) -> None:
        """Offer a method.

        Raises:
            TypeError: ``info`` is not a :class:`~kvcompress.method.MethodInfo`.
            ValueError: The plugin has already offered a method of that name.
        """
        if not isinstance(info, MethodInfo):
            raise TypeError(f"registry.add takes a MethodInfo (got {type(info).__name__})")
        if info.name in self._infos:
            raise ValueError(f"the plugin registers {info.name!r} twice")
        self._infos[info.name] = info

    def take(self) -> dict[str, MethodInfo]:
        """Return what was offered since the last call, and forget it."""
        infos, self._infos = self._infos, {}
        return infos


@frozen
class Loaded:
    """What came of loading a plugin: the methods it registered, or why there are none."""

    infos: Mapping[str, MethodInfo] = field(factory=dict)
    error: BaseException | None = None


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        # Touching every name of a module would run the lazy imports it may have.
        if not name.startswith(f"{hookspecs.PROJECT}_"):
            return None
        return super().parse_hookimpl_opts(plugin, name)


class PluginLoader:
    """Loads each plugin once and keeps what came of it."""

    def __init__(self) -> None:
        self._registrar = Registrar()
        self._loaded: dict[str, Loaded] = {}
        self._manager = _Manager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._manager.hook.kvcompress_register.call_historic(kwargs={"registry": self._registrar})

    @property
    def hook(self) -> pluggy.HookRelay:
        """Call ``hook.<name>()`` to ask all plugins loaded so far; the answers come as a list."""
        return self._manager.hook

    def load(self, key: str, source: Callable[[], object]) -> Loaded:
        """Load and register the plugin that ``source`` returns, unless ``key`` is loaded already.

        Whatever a plugin raises is kept, ``SystemExit`` and its like included; only the user's
        own interrupt passes.
        """
        if key not in self._loaded:
            try:
                self._loaded[key] = Loaded(self._register(source()))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._loaded[key] = Loaded(error=error)
        return self._loaded[key]

    def has_hooks(self, plugin: object) -> bool:
        """Whether anything of a plugin is marked as a hook, known or not."""
        return any(self._manager.parse_hookimpl_opts(plugin, name) for name in dir(plugin))

    def _register(self, plugin: object) -> dict[str, MethodInfo]:
        self._registrar.take()
        try:
            self._manager.register(plugin)
            self._manager.check_pending()
        except BaseException:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise
        return self._registrar.take()
