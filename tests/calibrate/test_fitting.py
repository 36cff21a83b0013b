from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.calibrate.contract import FitKey
from kvcompress.calibrate.fitting import fit_layers, measure, rounded, seed_of
from kvcompress.errors import BrokenPlugin
from tests.calibrate.fakes import LAYERS, Peak, calibration, samples_of

SAMPLES = [samples_of(layer) for layer in LAYERS]


def returning(result: Any) -> Any:
    """A method whose fit returns ``result``."""

    class Odd(Peak):
        def fit(self, samples: Any, *, seed: int) -> Any:
            return result

    return Odd()


def test_every_layer_is_fitted_with_a_seed_of_its_own() -> None:
    seeds: list[int] = []

    class Watched(Peak):
        def fit(self, samples: Any, *, seed: int) -> Any:
            seeds.append(seed)
            return super().fit(samples, seed=seed)

    for method, seed in ((Watched(), 0), (Watched(bits=4), 0), (Watched(), 1)):
        fit_layers(method, SAMPLES, seed)
    assert len(set(seeds)) == len(seeds) == 6
    fit_layers(Watched(window=9), SAMPLES, 0)
    assert set(seeds[6:]) == set(seeds[:2])
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of(FitKey("peak", '{"bits": 8}'), 3, 0) == 530940944


def test_tables_keep_their_dtype() -> None:
    tables = fit_layers(Peak(), SAMPLES, 0).tables[2]
    assert {name: str(table.dtype) for name, table in tables.items()} == {
        "key_steps": "float32",
        "value_steps": "float16",
        "drawn": "float32",  # NumPy's float64 is never meant
    }


def test_numbers_for_the_report_are_kept_apart() -> None:
    fit = fit_layers(Peak(bits=5), SAMPLES, 0)
    assert fit.report == {0: {"dead_centroids": 5.0}, 2: {"dead_centroids": 5.0}}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "must return a dict .got NoneType"),
        ({"a": [1, 2]}, "a must be a NumPy array of numbers"),
        ({"a": mx.zeros(3)}, "a must be a NumPy array of numbers"),
        ({"a": np.array(["x"])}, "a must be a NumPy array of numbers"),
        ({"a": np.array(1.0)}, "a must be a NumPy array of numbers"),
        ({"a": np.array([1.0, np.nan])}, "a is not finite in float32"),
        ({"a": np.array([1e300])}, "a is not finite in float32"),
    ],
)
def test_what_is_no_table_is_told(result: Any, words: str) -> None:
    with pytest.raises(BrokenPlugin, match=f"peak: fit of layer 0:? {words}"):
        fit_layers(returning(result), SAMPLES, 0)


def test_errors_are_measured_against_numpy() -> None:
    held = SAMPLES[0].split(50)[1]
    method = Peak(bits=3, calibration=calibration(Peak(bits=3)))
    report = measure(method, held)
    tables = method.calibration.tables(method, held.layer)
    steps, wide = tables["value_steps"].astype(np.float64), held.values.astype(np.float64)
    error = np.square(wide - np.round(wide / steps) * steps).sum(axis=-1).mean()
    assert report["value_error"] == pytest.approx(error, rel=1e-4)
    spread = np.square(wide - held.moments.value_mean).sum(axis=-1).mean()
    assert report["value_spread"] == pytest.approx(spread, rel=1e-5)
    assert 0 < report["key_error"] < 0.5 * report["key_spread"]


def test_more_bits_err_less() -> None:
    held = SAMPLES[0].split(50)[1]
    methods = [Peak(bits=bits) for bits in (2, 4, 8)]
    made = calibration(*methods)
    errors = [
        measure(Peak(bits=method.bits, calibration=made), held)["key_error"] for method in methods
    ]
    assert errors[0] > errors[1] > errors[2] > 0


def test_six_digits_are_kept() -> None:
    assert rounded(np.float32(1) / 3) == 0.333333
    assert rounded(123456789.0) == 123457000.0
