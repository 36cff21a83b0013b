"""The registry: from the name of a method to its description, its class and an instance."""

from __future__ import annotations

import difflib
import importlib
import inspect
import threading
import warnings
from functools import reduce
from typing import Any, Literal

import pluggy
from attrs import frozen

from kvcompress._version import __version__
from kvcompress.config import construct
from kvcompress.config.option import owner_name
from kvcompress.errors import (
    BrokenPlugin,
    ConfigError,
    IncompatiblePlugin,
    KVCompressError,
    PluginConflict,
    UnknownMethod,
)
from kvcompress.hookspecs import API_VERSION
from kvcompress.method import CompressionMethod, MethodInfo
from kvcompress.registry.discovery import (
    ADDONS_GROUP,
    METHODS_GROUP,
    Offer,
    canonical,
    find_offers,
)
from kvcompress.registry.plugins import Loaded, PluginLoader

LOCAL = "local"
"""What stands for the distribution of a plugin that was registered by hand."""


@frozen
class MethodStatus:
    """One row of the list of methods.

    Attributes:
        name: The method's name.
        distribution: Who offers it; ``local`` if it was registered by hand.
        version: The version of the distribution.
        status: ``ok``; ``broken`` (cannot be loaded); ``conflict`` (offered more than once, and
            ``"distribution:name"`` chooses); ``incompatible`` (made for another plugin API).
        summary: One line, where known.
        paper: Title and address of the paper, where there is one.
        detail: What is wrong, for a status other than ``ok``.
    """

    name: str
    distribution: str
    version: str
    status: Literal["ok", "broken", "conflict", "incompatible"]
    summary: str = ""
    paper: str = ""
    detail: str = ""


class Registry:
    """Knows the installed methods and those registered by hand; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._local: list[object] = []
        self.refresh()

    def refresh(self) -> None:
        """Forget what was found, so that newly installed distributions are seen.

        Plugins registered by hand stay.
        """
        with self._lock:
            importlib.invalidate_caches()
            self._loader = PluginLoader()
            self._found: dict[str, tuple[Offer, ...]] = {}

    def register(self, plugin: object) -> None:
        """Add a plugin by hand: a module or an object with hooks marked ``@hookimpl``.

        Raises:
            BrokenPlugin: The plugin has no hooks, or they do not keep the contract.
            PluginConflict: A plugin added by hand before offers a method of the same name.
        """
        with self._lock:
            if not self._loader.has_hooks(plugin):
                raise BrokenPlugin(
                    f"{plugin!r}: has no hook; mark one of kvcompress's with @kvcompress.hookimpl"
                )
            taken = {offer.name for offer in self._local_offers()}
            loaded = self._load_local(plugin)
            if loaded.error is None and not taken.intersection(loaded.infos):
                self._local.append(plugin)
                return
            self.refresh()
        if loaded.error is not None:
            raise BrokenPlugin(f"{plugin!r}: {_described(loaded.error)}") from loaded.error
        names = ", ".join(sorted(taken.intersection(loaded.infos)))
        raise PluginConflict(f"already registered by hand: {names}; unregister that plugin first")

    def unregister(self, plugin: object) -> None:
        """Take back :meth:`register`.

        Raises:
            UnknownMethod: The plugin is not registered.
        """
        with self._lock:
            if plugin not in self._local:
                raise UnknownMethod(f"{plugin!r} is not registered by hand")
            self._local.remove(plugin)
            self.refresh()

    def list_methods(self) -> list[MethodStatus]:
        """Return one row for each offer of a method, whether it works or not, by name."""
        with self._lock:
            offers = self._offers()
            rows = [self._status(offer, offers) for offer in offers]
        return sorted(rows, key=lambda row: (row.name, row.distribution))

    def method_info(self, name: str) -> MethodInfo:
        """Return the description of a method; ``"distribution:name"`` chooses among several.

        Raises:
            UnknownMethod: Nobody offers it.
            PluginConflict: Several distributions offer it, and ``name`` chooses none.
            BrokenPlugin: Its plugin cannot be imported or does not register it.
            IncompatiblePlugin: It was written for another version of the plugin API.
        """
        with self._lock:
            return self._info(self._choose(name))

    def method_class(self, name: str) -> type[Any]:
        """Import and return the class of a method.

        Raises:
            BrokenPlugin: The class cannot be imported, is no class or has no ``bind``.
            KVCompressError: As :meth:`method_info`.
        """
        info = self.method_info(name)
        module, _, path = info.target.partition(":")
        try:
            cls = reduce(getattr, path.split("."), importlib.import_module(module))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise BrokenPlugin(
                f"{info.name}: importing {info.target} failed: {_described(error)}"
            ) from error
        if not inspect.isclass(cls):
            raise BrokenPlugin(f"{info.name}: {info.target} is not a class (got {cls!r})")
        if inspect.isabstract(cls) or not callable(getattr(cls, "bind", None)):
            raise BrokenPlugin(f"{info.name}: {info.target} does not implement bind(layer)")
        return cls

    def get_method(
        self, name: str, *, calibration: Any = None, **options: Any
    ) -> CompressionMethod:
        """Return a configured method.

        Args:
            name: The method's name; ``"distribution:name"`` chooses among several.
            calibration: A calibration or the path of its file, for a method that takes one.
            **options: The method's options.

        Raises:
            ConfigError: An option is unknown or not legal, or they do not fit together.
            BrokenPlugin: The class fails in its own way or does not keep the contract.
            KVCompressError: As :meth:`method_class`.
        """
        cls = self.method_class(name)
        info = self.method_info(name)
        try:
            method: CompressionMethod = _made(cls, calibration, options)
            keeps = isinstance(method, CompressionMethod)  # which reads its properties
        except KVCompressError:
            raise
        except Exception as error:
            raise BrokenPlugin(
                f"{info.name}: making an instance of {info.target} failed: {_described(error)}"
            ) from error
        if not keeps:
            raise BrokenPlugin(
                f"{info.name}: {info.target} does not keep the contract of "
                "CompressionMethod; derive it from kvcompress.Method and give it a `name`"
            )
        if method.name != info.name:
            raise BrokenPlugin(
                f"{info.name}: {info.target} names itself {method.name!r}; both names must agree"
            )
        return method

    def hooks(self) -> pluggy.HookRelay:
        """Load every plugin and return pluggy's relay: ``hooks().kvcompress_metrics()``.

        A broken plugin of the group ``kvcompress.plugins`` is warned of; broken methods are rows
        of :meth:`list_methods`.
        """
        with self._lock:
            for offer in self._offers():
                self._load(offer)
            for offer in self._discovered(ADDONS_GROUP):
                error = self._load(offer).error
                if error is not None:
                    warnings.warn(
                        f"plugin {offer.name!r} of {offer.origin} is broken: {_described(error)}",
                        stacklevel=2,
                    )
            return self._loader.hook

    def _discovered(self, group: str) -> tuple[Offer, ...]:
        if group not in self._found:
            self._found[group] = find_offers(group)
        return self._found[group]

    def _offers(self) -> tuple[Offer, ...]:
        return (*self._local_offers(), *self._discovered(METHODS_GROUP))

    def _local_offers(self) -> list[Offer]:
        return [
            Offer(name, LOCAL, "", _local_key(plugin), lambda plugin=plugin: plugin)  # type: ignore[misc]
            for plugin in self._local
            for name in self._load_local(plugin).infos
        ]

    def _load_local(self, plugin: object) -> Loaded:
        return self._loader.load(_local_key(plugin), lambda: plugin)

    def _load(self, offer: Offer) -> Loaded:
        return self._loader.load(offer.value, offer.load)

    def _status(self, offer: Offer, offers: tuple[Offer, ...]) -> MethodStatus:
        status: Literal["ok", "broken", "conflict", "incompatible"] = "ok"
        detail = ""
        try:
            self._info(offer)
            rivals = [rival for rival in offers if rival.name == offer.name]
            if len(rivals) > 1:
                status, detail = "conflict", str(_conflict(offer.name, rivals))
        except IncompatiblePlugin as error:
            status, detail = "incompatible", str(error)
        except BrokenPlugin as error:
            status, detail = "broken", str(error)
        info = self._load(offer).infos.get(offer.name)
        return MethodStatus(
            offer.name,
            offer.distribution,
            offer.version,
            status,
            info.summary if info else "",
            info.paper if info else "",
            detail,
        )

    def _choose(self, name: str) -> Offer:
        distribution, _, method = str(name).rpartition(":")
        offers = self._offers()
        chosen = [
            offer
            for offer in offers
            if offer.name == method
            and (not distribution or canonical(offer.distribution) == canonical(distribution))
        ]
        if not chosen:
            known = sorted({offer.name for offer in offers})
            selectors = [offer.selector for offer in offers] if distribution else known
            near = difflib.get_close_matches(str(name), selectors, n=1)
            bare, _, options = str(name).partition(":")
            if bare in known and "=" in options:
                hint = f"; options go as keywords: get_method({bare!r}, option=value)."
            else:
                hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UnknownMethod(
                f"no method named {name!r}{hint} Methods: {', '.join(known) or 'none'}. "
                "See `kvcompress methods`"
            )
        if len(chosen) > 1:
            raise _conflict(method, chosen)
        return chosen[0]

    def _info(self, offer: Offer) -> MethodInfo:
        loaded = self._load(offer)
        if loaded.error is not None:
            raise BrokenPlugin(
                f"{offer.name}: loading {offer.value!r} of {offer.origin} failed: "
                f"{_described(loaded.error)}"
            ) from loaded.error
        info = loaded.infos.get(offer.name)
        if info is None:
            registered = ", ".join(sorted(loaded.infos)) or "nothing"
            raise BrokenPlugin(
                f"{offer.name}: {offer.value!r} of {offer.origin} has an entry point of that name "
                f"but registers {registered}"
            )
        if info.api_version != API_VERSION:
            raise IncompatiblePlugin(
                f"{offer.name}: {offer.origin} was written for version {info.api_version} of the "
                f"plugin API; kvcompress {__version__} has version {API_VERSION}. Install a "
                f"release of {offer.distribution} or of kvcompress that fits the other"
            )
        return info


def _made(cls: type[Any], calibration: Any, options: dict[str, Any]) -> Any:
    extra = {}
    if calibration is not None:
        if "calibration" not in inspect.signature(cls).parameters:
            raise ConfigError(f"{owner_name(cls)}: the method takes no calibration")
        extra["calibration"] = calibration
    return construct(cls, options, **extra)


def _local_key(plugin: object) -> str:
    return f"{LOCAL} {id(plugin)}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _conflict(name: str, offers: list[Offer]) -> PluginConflict:
    choices = " or ".join(repr(offer.selector) for offer in offers)
    return PluginConflict(f"{name}: offered {len(offers)} times; choose one by {choices}")
