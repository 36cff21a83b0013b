from __future__ import annotations

import subprocess
import sys

import pytest

import kvcompress


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "{'mlx', 'mlx_lm', 'numpy', 'transformers', 'pluggy', 'attrs', 'typer', 'rich'}"
    assert run(f"import sys, kvcompress; print({heavy} & set(sys.modules) or 'light')") == "light"


def test_making_a_description_imports_no_mlx() -> None:
    program = (
        "import sys; from kvcompress import MethodInfo, Method, get_method, hookimpl\n"
        "print({'mlx', 'mlx_lm', 'numpy'} & set(sys.modules) or 'light')"
    )
    assert run(program) == "light"


def test_every_public_name_can_be_had() -> None:
    assert set(kvcompress.__all__) <= set(dir(kvcompress))
    assert set(kvcompress._MODULE_OF) <= set(kvcompress.__all__)
    for name in kvcompress.__all__:
        assert getattr(kvcompress, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvcompress' has no attribute 'nothing'"):
        kvcompress.nothing  # noqa: B018
