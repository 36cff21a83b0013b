from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

from kvcompress import cache

QUIET = """
import sys
import kvcompress.cache
assert not {"mlx", "mlx_lm", "numpy"} & set(sys.modules), sorted(sys.modules)
"""


def test_every_public_name_can_be_had_and_is_listed() -> None:
    for name in cache.__all__:
        assert getattr(cache, name).__name__ == name
        assert name in dir(cache)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'attatch'"):
        cache.attatch  # noqa: B018


def test_importing_a_module_never_hides_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(cache.__path__)}
    assert not modules & set(cache.__all__)
    for name in modules:
        importlib.import_module(f"kvcompress.cache.{name}")
    assert callable(cache.attach)


def test_the_package_itself_imports_no_mlx() -> None:
    subprocess.run([sys.executable, "-c", QUIET], check=True)
