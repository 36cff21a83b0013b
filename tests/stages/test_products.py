from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.stages import products
from kvcompress.stages.products import complex_pays, dots, sums
from tests.stages.vq_cases import HEADS, MAKE, normal, rows


@pytest.fixture(params=[False, True], ids=["other BLAS", "OpenBLAS"])
def openblas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "_openblas", lambda: request.param)
    monkeypatch.setattr(products, "_LEAST_NUMBERS", 1)
    return bool(request.param)


def test_few_rows_pay_where_openblas_answers(openblas: bool) -> None:
    assert complex_pays(1) == complex_pays(8) == openblas
    assert not complex_pays(9)


def test_not_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_openblas", lambda: True)
    monkeypatch.setattr(products, "on_cpu", lambda: False)
    assert not complex_pays(1)


@pytest.mark.parametrize("count", [1, 3, 8, 9])
@pytest.mark.parametrize("dim", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_those_of_real_numbers(
    openblas: bool, count: int, dim: int, turned: bool
) -> None:
    q, x, p = normal(2, 3, count, dim), normal(2, 3, 50, dim, seed=1), normal(2, 3, count, 50)
    lazy = mx.array(x)
    if turned:  # channels that do not lie side by side
        lazy = mx.array(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)
    got = dots(mx.array(q), lazy), sums(mx.array(p), lazy)
    assert got[0].dtype == got[1].dtype == mx.float32
    np.testing.assert_allclose(got[0], q @ x.swapaxes(-1, -2), atol=2e-5)
    np.testing.assert_allclose(got[1], p @ x, atol=2e-5)


def test_few_numbers_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_openblas", lambda: True)
    q, x = mx.array(normal(1, 1, 1, 64)), mx.array(normal(1, 1, 1000, 64))
    assert mx.array_equal(dots(q, x), q @ x.swapaxes(-1, -2))


@given(
    st.sampled_from(sorted(MAKE)),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_a_quantiser_multiplies_what_it_decodes(
    kind: str, bits: int, count: int, batch: int, fast: bool, cpu: bool
) -> None:
    vq = MAKE[kind](12, bits)
    codes = vq.encode(rows(12, 40, 1, batch))
    q, p = rows(12, count, 2, batch), rows(40, count, 3, batch)
    decoded = vq.decode(codes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_openblas", lambda: fast)
        patch.setattr("kvcompress.stages.commuting_vq.on_cpu", lambda: cpu)
        got = vq.dots(q, codes), vq.sums(p, codes)
    assert got[0].shape == (batch, HEADS, count, 40)
    np.testing.assert_allclose(got[0], q @ decoded.swapaxes(-1, -2), atol=1e-4)
    np.testing.assert_allclose(got[1], p @ decoded, atol=2e-4)


def test_openblas_is_asked_for_once_and_truly() -> None:
    code = (
        "from kvcompress.openblas import openblas_answers, prefer_openblas\n"
        "before = openblas_answers(); loaded = prefer_openblas()\n"
        "from kvcompress.stages.products import complex_pays\n"
        "print(openblas_answers() == loaded == complex_pays(1), before <= loaded)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
