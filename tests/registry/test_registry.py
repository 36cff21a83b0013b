from __future__ import annotations

import builtins
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from attrs import frozen

from kvcompress import (
    BrokenPlugin,
    CompressionMethod,
    ConfigError,
    IncompatiblePlugin,
    KVCompressError,
    Method,
    MethodInfo,
    PluginConflict,
    UnknownMethod,
    hookimpl,
)
from kvcompress.registry import MethodStatus, Registry
from tests.fake_site import CODE, HOOKS, Site


def rows(registry: Registry) -> dict[str, MethodStatus]:
    return {f"{row.distribution}:{row.name}": row for row in registry.list_methods()}


def test_an_installed_method_is_listed_and_made(site: Site) -> None:
    site.toy()
    registry = Registry()
    assert rows(registry)["toys:toy"] == MethodStatus(
        "toy", "toys", "1.2", "ok", "A toy.", "Toys, https://toys.org"
    )
    method = registry.get_method("toy", bits=3, window=-1)
    assert isinstance(method, CompressionMethod)
    assert method.bind("layer") == ("codec", 3, "layer")
    assert (method.name, method.window) == ("toy", -1)


def test_options_are_checked_by_name_one_by_one_and_together(site: Site) -> None:
    site.toy()
    registry = Registry()
    with pytest.raises(ConfigError, match="toy: unknown option 'bit'; did you mean 'bits'"):
        registry.get_method("toy", bit=3)
    with pytest.raises(ConfigError, match=r"toy: bits must be an integer from 1 to 8 \(got 9\)"):
        registry.get_method("toy", bits=9)
    with pytest.raises(ConfigError, match=r"toy: bits must be 2 or more with mode='good' \(got 1"):
        registry.get_method("toy", bits=1, mode="good")
    with pytest.raises(ConfigError, match="toy: the method takes no calibration"):
        registry.get_method("toy", calibration="file.safetensors")


def test_an_unknown_method_is_named_with_what_is_near(site: Site) -> None:
    site.toy()
    registry = Registry()
    with pytest.raises(UnknownMethod, match="no method named 'tooy'; did you mean 'toy'"):
        registry.get_method("tooy")
    with pytest.raises(UnknownMethod, match="did you mean 'toys:toy'"):
        registry.get_method("toyz:toy")
    with pytest.raises(UnknownMethod, match=r"keywords: get_method\('toy', option=value\)"):
        registry.get_method("toy:bits=3")
    with pytest.raises(UnknownMethod, match="no method named None"):
        registry.get_method(None)  # type: ignore[arg-type]


BROKEN = {
    "missing module": (None, "ModuleNotFoundError"),
    "error": ("raise ValueError('oops')", "ValueError: oops"),
    "syntax": ("def (", "SyntaxError"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "base exception": ("class Panic(BaseException): pass\nraise Panic('rust')", "Panic: rust"),
    "no hook": ("", "has an entry point of that name but registers nothing"),
    "another name": (HOOKS.format(name="other", module="bad"), "but registers other"),
    "hook raises": (
        HOOKS.format(name="bad", module="bad").replace("registry.add(", "1 / registry.add("),
        "TypeError",
    ),
    "not an info": (
        HOOKS.format(name="bad", module="bad") + "    registry.add('bad')",
        "TypeError: registry.add takes a MethodInfo",
    ),
    "twice": (
        HOOKS.format(name="bad", module="bad") + "    kvcompress_register(registry)",
        "ValueError: the plugin registers 'bad' twice",
    ),
    "unknown argument": (
        HOOKS.format(name="bad", module="bad").replace("(registry)", "(registry, more)"),
        "PluginValidationError",
    ),
    "misspelt hook": (
        HOOKS.format(name="bad", module="bad").replace(
            "kvcompress_register", "kvcompress_registre"
        ),
        "PluginValidationError",
    ),
    "newer info": (
        HOOKS.format(name="bad", module="bad").replace("paper=", "license='x', paper="),
        "TypeError",
    ),
    "bad target": (
        HOOKS.format(name="bad", module="bad").replace("bad_code:Toy", "bad_code"),
        "MethodInfo: target must be 'module:attribute'",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_a_row_and_harms_no_other(site: Site, kind: str) -> None:
    source, complaint = BROKEN[kind]
    site.distribution("aaa-bad", {"bad": "bad"})
    if source is not None:
        site.module("bad", source)
    site.toy()
    registry = Registry()
    row = rows(registry)["aaa-bad:bad"]
    assert row.status == "broken"
    assert complaint in row.detail
    assert "bad" in row.detail
    assert registry.get_method("toy").name == "toy"
    with pytest.raises(BrokenPlugin) as caught:
        registry.get_method("bad")
    assert str(caught.value) == row.detail


def test_the_cause_of_a_broken_plugin_is_chained(site: Site) -> None:
    site.module("bad", "raise ValueError('oops')")
    site.distribution("bads", {"bad": "bad"})
    with pytest.raises(BrokenPlugin) as caught:
        Registry().get_method("bad")
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_user_s_interrupt_passes(site: Site) -> None:
    site.module("bad", "raise KeyboardInterrupt")
    site.distribution("bads", {"bad": "bad"})
    registry = Registry()
    with pytest.raises(KeyboardInterrupt):
        registry.list_methods()


def test_a_damaged_entry_point_file_is_a_row(site: Site) -> None:
    site.raw_distribution("damaged", "[kvcompress.methods]\nno equals sign\n")
    site.toy()
    found = rows(Registry())
    assert found["damaged:damaged"].status == "broken"
    assert found["toys:toy"].status == "ok"


def test_a_distribution_without_metadata_is_listed(site: Site) -> None:
    site.toy()
    next(site.root.glob("*.dist-info/METADATA")).unlink()
    assert Registry().method_info("toy").name == "toy"


def test_of_two_copies_of_a_distribution_the_first_on_the_path_counts(
    site: Site, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.toy()
    older = Site(tmp_path_factory.mktemp("older"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(older.root)])
    older.distribution("Toys", {"toy": "no_such_module"})
    assert Registry().method_info("toy").name == "toy"


TARGETS = {
    "missing module": (None, "ModuleNotFoundError"),
    "error": ("raise ValueError('oops')", "ValueError: oops"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "missing attribute": ("", "AttributeError"),
    "no class": ("Toy = 3", "is not a class"),
    "no bind": ("class Toy: pass", "does not implement bind"),
    "abstract": (
        "from kvcompress import Method\nclass Toy(Method): pass",
        "does not implement bind",
    ),
    "no contract": ("class Toy:\n    def bind(self, layer): pass", "does not keep the contract"),
    "no name": (
        CODE.replace('    name: ClassVar[str] = "{name}"\n', ""),
        "does not keep the contract",
    ),
    "own error": (
        CODE.format(name="toy").replace("def check(self):", "def check(self):\n        1 / 0"),
        "an instance of .* failed: ZeroDivisionError",
    ),
    "broken property": (
        CODE.format(name="toy") + "    @property\n    def fingerprint(self): raise OSError('no')",
        "an instance of .* failed: OSError: no",
    ),
    "no signature": (
        "class Toy(int):\n    name = 'toy'\n    def bind(self, layer): pass",
        "an instance of .* failed: ValueError",
    ),
    "another name": (CODE.format(name="other"), "names itself 'other'"),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_class_that_cannot_be_had_is_a_broken_plugin(site: Site, kind: str) -> None:
    source, complaint = TARGETS[kind]
    site.toy()
    (site.root / "toy_plugin_code.py").unlink()
    if source is not None:
        site.module("toy_plugin_code", source)
    registry = Registry()
    assert rows(registry)["toys:toy"].status == "ok"
    with pytest.raises(BrokenPlugin, match=complaint) as caught:
        registry.get_method("toy")
    assert "toy_plugin_code:Toy" in str(caught.value)
    if kind in ("missing module", "error", "exit", "missing attribute"):
        assert caught.value.__cause__ is not None


def test_a_plugin_for_another_api_is_incompatible(site: Site) -> None:
    site.toy()
    site.module(
        "toy_plugin",
        HOOKS.format(name="toy", module="toy_plugin").replace("paper=", "api_version=2, paper="),
    )
    registry = Registry()
    row = rows(registry)["toys:toy"]
    assert (row.status, row.summary) == ("incompatible", "A toy.")
    with pytest.raises(
        IncompatiblePlugin, match=r"toys 1.2 was written for version 2 .* version 1"
    ):
        registry.get_method("toy")
    assert "toy_plugin_code" not in sys.modules


def test_a_name_offered_twice_is_a_conflict_until_one_is_chosen(site: Site) -> None:
    site.toy(dist="first-toys", module="first")
    site.toy(dist="Second_Toys", module="second")
    registry = Registry()
    found = rows(registry)
    assert [found[f"{d}:toy"].status for d in ("first-toys", "second-toys")] == ["conflict"] * 2
    for call in (registry.get_method, registry.method_info, registry.method_class):
        with pytest.raises(PluginConflict) as caught:
            call("toy")
        assert "'first-toys:toy'" in str(caught.value)
        assert "'second-toys:toy'" in str(caught.value)
    assert registry.method_info("first-toys:toy").target == "first_code:Toy"
    assert registry.method_info("second.TOYS:toy").target == "second_code:Toy"
    assert type(registry.get_method("second-toys:toy")).__module__ == "second_code"


def test_a_broken_rival_keeps_its_own_complaint(site: Site) -> None:
    site.toy()
    site.distribution("others", {"toy": "no_such_module"})
    found = rows(Registry())
    assert found["others:toy"].status == "broken"
    assert found["toys:toy"].status == "conflict"


def test_one_module_may_offer_several_methods(site: Site) -> None:
    hook = HOOKS.format(name="one", module="pair")
    site.module("pair", hook + '    registry.add(MethodInfo("two", "Two.", "pair_code:Two"))\n')
    site.module("pair_code", CODE.format(name="one"))
    site.distribution("pairs", {"one": "pair", "two": "pair"})
    registry = Registry()
    found = rows(registry)
    assert found["pairs:one"].status == found["pairs:two"].status == "ok"
    assert registry.get_method("one").name == "one"


def test_only_the_plugin_asked_for_is_imported(site: Site) -> None:
    site.toy()
    site.toy("toy2", module="toy2_plugin", dist="toys2")
    registry = Registry()
    registry.method_info("toy")
    assert "toy_plugin" in sys.modules
    assert "toy_plugin_code" not in sys.modules
    registry.get_method("toy")
    assert "toy_plugin_code" in sys.modules
    assert "toy2_plugin" not in sys.modules


def test_listing_runs_no_lazy_import_of_a_plugin(site: Site) -> None:
    lazy = """
def __getattr__(name):
    raise SystemExit(name)

def __dir__():
    return ["Toy", *globals()]
"""
    site.toy()
    site.module("toy_plugin", HOOKS.format(name="toy", module="toy_plugin") + lazy)
    assert rows(Registry())["toys:toy"].status == "ok"


def test_results_are_kept_until_refreshed(site: Site) -> None:
    registry = Registry()
    assert "toys:toy" not in rows(registry)
    site.toy()
    assert "toys:toy" not in rows(registry)
    registry.refresh()
    assert rows(registry)["toys:toy"].status == "ok"


def test_threads_share_one_slow_import(site: Site) -> None:
    site.toy()
    slow = """
import builtins, time
time.sleep(0.2)
builtins.toy_imports = getattr(builtins, "toy_imports", 0) + 1
"""
    site.module("toy_plugin", slow + HOOKS.format(name="toy", module="toy_plugin"))
    registry = Registry()
    start = threading.Barrier(8)
    made: list[Any] = []

    def make() -> None:
        start.wait()
        made.append(registry.get_method("toy", bits=3))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builtins.__dict__.pop("toy_imports") == 1
    assert len(made) == 8
    assert all(method == made[0] for method in made)


@frozen(kw_only=True)
class Local(Method):
    name: ClassVar[str] = "by-hand"

    def bind(self, layer: Any) -> Any:
        return layer


class LocalPlugin:
    @hookimpl
    def kvcompress_register(self, registry: Any) -> None:
        registry.add(MethodInfo("by-hand", "Local.", f"{__name__}:Local"))

    @hookimpl
    def kvcompress_metrics(self) -> dict[str, Any]:
        return {"mean": sum}


def test_a_plugin_can_be_registered_by_hand_and_taken_back() -> None:
    registry = Registry()
    plugin = LocalPlugin()
    registry.register(plugin)
    assert rows(registry)["local:by-hand"].status == "ok"
    registry.refresh()
    assert type(registry.get_method("local:by-hand")).__name__ == "Local"
    with pytest.raises(PluginConflict, match="already registered by hand: by-hand"):
        registry.register(LocalPlugin())
    assert registry.get_method("by-hand").name == "by-hand"
    registry.unregister(plugin)
    assert "local:by-hand" not in rows(registry)
    with pytest.raises(UnknownMethod):
        registry.unregister(plugin)
    registry.register(LocalPlugin())


def test_a_broken_plugin_registered_by_hand_is_refused_at_once() -> None:
    def kvcompress_register(registry: Any) -> None:
        raise ValueError("oops")

    registry = Registry()
    with pytest.raises(BrokenPlugin, match="ValueError: oops"):
        registry.register(SimpleNamespace(kvcompress_register=hookimpl(kvcompress_register)))
    assert not any(row.distribution == "local" for row in registry.list_methods())


@pytest.mark.parametrize("plugin", [None, 5, "turboquant", SimpleNamespace()])
def test_what_has_no_hook_is_refused_at_once(plugin: Any) -> None:
    with pytest.raises(BrokenPlugin, match="has no hook"):
        Registry().register(plugin)


def test_hooks_answer_for_all_plugins_and_warn_of_broken_ones(site: Site) -> None:
    hook = "@hookimpl\ndef kvcompress_metrics():\n    return {'m': len}\n"
    site.module("extra", f"from kvcompress import hookimpl\n{hook}")
    site.distribution("extras", {"extra": "extra"}, group="kvcompress.plugins")
    site.distribution("bads", {"bad": "no_such_module"}, group="kvcompress.plugins")
    registry = Registry()
    registry.register(LocalPlugin())
    with pytest.warns(UserWarning, match="plugin 'bad' of bads 1.2 is broken: ModuleNotFound"):
        answers = registry.hooks().kvcompress_metrics()
    assert {"m": len} in answers
    assert {"mean": sum} in answers
    assert not any(row.name in ("extra", "bad") for row in registry.list_methods())


def test_every_error_is_one_of_the_library_s() -> None:
    for kind in (BrokenPlugin, ConfigError, IncompatiblePlugin, PluginConflict, UnknownMethod):
        assert issubclass(kind, KVCompressError)


def test_listing_imports_neither_mlx_nor_a_method_s_code(site: Site) -> None:
    site.toy()
    program = (
        "import sys, kvcompress\n"
        "assert any(row.name == 'toy' for row in kvcompress.list_methods())\n"
        "print(sorted({'mlx', 'mlx_lm', 'numpy', 'toy_plugin_code'} & set(sys.modules)))"
    )
    assert run(program, site.root) == "[]"


def run(program: str, path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
