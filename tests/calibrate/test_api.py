from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from kvcompress import get_method, registry
from kvcompress.calibrate import calibrate
from kvcompress.calibrate.api import configured
from kvcompress.calibrate.file import to_bytes
from kvcompress.errors import BrokenPlugin, ConfigError, UnknownMethod
from kvcompress.text import Text
from tests.calibrate.fakes import PROSE, ByteTokenizer, Peak, PeakPlugin, Plain, tiny_llama

TOKENIZER = ByteTokenizer()

WRITE = """
import sys
from pathlib import Path
from tests.calibrate.fakes import PROSE, ByteTokenizer, Peak, tiny_llama
from kvcompress.calibrate import calibrate
methods = [Peak(), Peak(bits=4)]
calibrate(tiny_llama(), ByteTokenizer(), PROSE, methods, tokens=600).save(sys.argv[1])
"""


@pytest.fixture
def peak() -> Any:
    plugin = PeakPlugin()
    registry.register(plugin)
    yield "peak"
    registry.unregister(plugin)


def made(*methods: Any, **options: Any) -> Any:
    options = {"tokens": 600, **options}
    return calibrate(tiny_llama(), TOKENIZER, PROSE, methods, **options)


def test_a_calibrated_method_runs_on_the_model() -> None:
    calibration = made(Peak())
    model = tiny_llama()
    method = Peak(calibration=calibration, window=8)
    caches = method.make_cache(model)
    import mlx.core as mx

    ids = mx.array(list(PROSE[:100].encode()))[None]
    exact, coded = model(ids), model(ids[:, :80], cache=caches)
    coded = model(ids[:, 80:], cache=caches)
    assert caches[0].tokens_coded > 50
    difference = float(mx.abs(coded - exact[:, 80:]).max())
    assert 0 < difference < 0.05 * float(mx.abs(exact).max())


def test_the_report_is_of_tokens_that_were_not_fitted_to() -> None:
    seen: list[int] = []

    class Watched(Peak):
        def fit(self, samples: Any, *, seed: int) -> Any:
            seen.append(len(samples.keys))
            return super().fit(samples, seed=seed)

    calibration = made(Watched())
    there = 600 - 4
    assert seen == [there - there // 16] * 2
    report = calibration.fits[0].report
    assert set(report) == {0, 1}
    assert set(report[0]) == {
        "dead_centroids",
        "key_spread",
        "key_error",
        "value_spread",
        "value_error",
    }
    assert 0 < report[0]["key_error"] < 0.01 * report[0]["key_spread"]


def test_the_provenance_names_the_text_the_model_and_the_versions(tmp_path: Path) -> None:
    file = tmp_path / "novel.txt"
    file.write_text(PROSE)
    calibration = calibrate(tiny_llama(), TOKENIZER, file, tokens=600, seed=5)
    provenance = calibration.provenance
    assert provenance["text"] == {"name": "novel.txt", "sha256": Text("x", PROSE).sha256}
    assert provenance["tokens"] == 600
    assert provenance["seed"] == 5
    assert provenance["model"]["architecture"] == "mlx_lm.models.llama.Model"
    assert set(provenance["versions"]) == {"kvcompress", "mlx", "mlx-lm", "numpy"}
    other = calibrate(tiny_llama(seed=1), TOKENIZER, file, tokens=600)
    assert other.provenance["model"]["weights"] != provenance["model"]["weights"]


def test_the_bytes_are_the_same_in_every_process(tmp_path: Path) -> None:
    files = []
    for seed in ("0", "77"):
        files.append(tmp_path / seed)
        subprocess.run(
            [sys.executable, "-c", WRITE, str(files[-1])],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
        )
    assert files[0].read_bytes() == files[1].read_bytes()


def test_tables_do_not_depend_on_the_other_methods() -> None:
    alone, together = made(Peak()), made(Peak(bits=2, centroids=20), Peak())
    assert to_bytes(together.subset([Peak()])) == to_bytes(alone)


def test_another_seed_draws_and_samples_otherwise() -> None:
    assert to_bytes(made(Peak())) == to_bytes(made(Peak()))
    a, b = (made(Peak(), seed=seed) for seed in (0, 1))
    layer = a.layers[0]
    assert not np.array_equal(a.tables(Peak(), layer)["drawn"], b.tables(Peak(), layer)["drawn"])
    np.testing.assert_array_equal(a.moments(layer).key_mean, b.moments(layer).key_mean)


def test_methods_are_instances_classes_names_and_grids(peak: str) -> None:
    methods = configured([Peak(bits=2), Peak, "peak:bits=3,4", Plain])
    assert [getattr(method, "bits", None) for method in methods] == [2, 8, 3, 4, None]
    assert [method.bits for method in configured("peak:bits=5")] == [5]
    assert [method.bits for method in configured(Peak(bits=6))] == [6]


def test_the_same_tables_are_fitted_once(peak: str) -> None:
    calibration = made(Peak(), Peak(window=3), "peak", Plain())
    assert [fit.key.values for fit in calibration.fits] == [{"bits": 8}]


@pytest.mark.parametrize("methods", [[3], [None], [object()], 3, None])
def test_what_is_no_method_is_told(methods: Any) -> None:
    with pytest.raises(ConfigError, match="methods must be methods"):
        configured(methods)
    with pytest.raises(UnknownMethod):
        made("nobody")


def test_without_methods_the_moments_are_recorded() -> None:
    calibration = made()
    assert calibration.fits == ()
    assert calibration.moments(calibration.layers[1]).tokens == 600 - 4


def test_a_method_may_take_the_moments_alone() -> None:
    calibration = made("turboquant:centre=calibrated")
    method = get_method("turboquant", centre="calibrated", calibration=calibration)
    layer = calibration.layers[1]
    mean = method.bind(layer).keys.centre.mean
    assert mean is not None
    np.testing.assert_array_equal(np.array(mean), calibration.moments(layer).key_mean)


def test_few_tokens_for_many_centroids_are_warned_of() -> None:
    with pytest.warns(
        UserWarning,
        match=r"peak: 559 tokens are few for 64 centroids; .* calibrate on at least 1536 tokens "
        r"\(600 were read: a longer text or tokens=1536\), or ask for fewer centroids",
    ):
        made(Peak(centroids=64))


def test_a_sample_that_memory_bounds_is_warned_of_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompress.calibrate.capture.SAMPLE_BYTES", 1 << 12)
    with pytest.warns(UserWarning, match="600 were read: no more fit in memory"):
        made(Peak(centroids=5))


def test_enough_tokens_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    made(Peak(centroids=34))
    assert not recwarn.list


@pytest.mark.parametrize("seed", [-1, 1.0, True, "0", None])
def test_illegal_seeds(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer of at least 0"):
        made(seed=seed)


def test_a_method_must_take_the_calibration_it_fits() -> None:
    @frozen(kw_only=True)
    class Forgetful(Plain):
        fit_options = ()

        def fit(self, samples: Any, *, seed: int) -> Any:
            return {}

    with pytest.raises(BrokenPlugin, match="attrs class that declares calibration"):
        made(Forgetful())

    class Unfrozen:
        name = "unfrozen"
        bind = fit = config = dict

    with pytest.raises(BrokenPlugin, match=r"unfrozen: .* must be an attrs class"):
        made(Unfrozen())


def test_progress_tells_of_every_step() -> None:
    steps: list[str] = []
    made(Peak(), progress=lambda step, done, total: steps.append(f"{step} {done}/{total}"))
    assert steps == [
        "recording 0/600",
        "recording 600/600",
        "fitting peak bits=8 0/2",
        "fitting peak bits=8 1/2",
        "fitting peak bits=8 2/2",
    ]


@pytest.mark.model
def test_the_real_model(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    calibration = calibrate(model, tokenizer, "prose-calibration", [Peak()], tokens=700)
    assert len(calibration.layers) == 30
    layer = calibration.layers[20]
    assert (layer.kv_heads, layer.query_heads, layer.head_dim) == (3, 9, 64)
    moments = calibration.moments(layer)
    # What real keys are like: before RoPE a large constant part, much less of it after.
    assert share_of_mean(moments.key_mean, moments.key_variance) > 0.5
    assert share_of_mean(moments.value_mean, moments.value_variance) < 0.4
    eigenvalues = np.linalg.eigvalsh(moments.query_moment.astype(np.float64))
    assert (eigenvalues > 0).all()
    report = calibration.fits[0].report
    shares = [row["key_error"] / row["key_spread"] for row in report.values()]
    assert max(shares) < 0.05


def share_of_mean(mean: np.ndarray, variance: np.ndarray) -> float:
    """The part of the energy that a head's mean carries."""
    energy = np.square(mean).sum()
    return float(energy / (energy + variance.sum()))
