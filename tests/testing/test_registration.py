"""Suites for methods by name, and for methods that need a calibration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import frozen

from kvcompress import registry
from kvcompress.calibrate import LayerSamples, calibration_of
from kvcompress.codec import KVCodec
from kvcompress.hookspecs import hookimpl
from kvcompress.layers import LayerSpec
from kvcompress.method import MethodInfo, calibration_field
from kvcompress.stages.base import Transform
from kvcompress.stages.transform import ChannelScale
from kvcompress.testing import LawError, MethodConformance, suites
from kvcompress.testing.calibration import SyntheticCalibration, synthetic_samples
from tests.testing.sound import Sound


@frozen(kw_only=True)
class Fitted(Sound):
    """Channels are divided by the deviations that a calibration gives them."""

    name: ClassVar[str] = "fitted"
    fit_options: ClassVar[tuple[str, ...]] = ("frame",)
    calibration: Any = calibration_field()

    def fit(self, samples: LayerSamples, *, seed: int) -> dict[str, np.ndarray]:
        moments = samples.moments
        keys = moments.post_key_variance if self.frame == "post" else moments.key_variance
        return {"keys": np.sqrt(keys), "values": np.sqrt(moments.value_variance)}

    def bind(self, layer: LayerSpec) -> KVCodec:
        tables = calibration_of(self).tables(self, layer)
        bound = Sound.bind(self, layer)
        keys, values = (self.scaled(tables[name]) for name in ("keys", "values"))
        return KVCodec(
            layer,
            type(bound.keys)(keys, bound.keys.coder, bound.keys.centre),
            type(bound.values)(values, bound.values.coder, bound.values.centre),
            bound.rope,
        )

    def scaled(self, table: np.ndarray) -> Transform:
        return ChannelScale(np.maximum(table, 1e-3))


@frozen(kw_only=True)
class Silent(Sound):
    """Says that it needs a calibration, and binds without."""

    name: ClassVar[str] = "silent"


class Plugin:
    @hookimpl
    def kvcompress_register(self, registry: Any) -> None:
        for name in ("fitted", "silent"):
            registry.add(
                MethodInfo(
                    name,
                    "A toy.",
                    f"{__name__}:{name.title()}",
                    needs_calibration=True,
                    capabilities=frozenset({"approximate-scores"}),
                )
            )


@pytest.fixture
def plugin() -> Iterator[None]:
    made = Plugin()
    registry.register(made)
    yield
    registry.unregister(made)


def named(name: str) -> MethodConformance:
    made: MethodConformance = suites(__name__)[f"Test{name}"]()
    return made


def test_a_method_by_name_has_its_capabilities(plugin: None) -> None:
    suite = named("Fitted")
    assert suite.method == "fitted"
    assert suite.can("approximate-scores")
    assert not suite.can("plain")


def test_a_calibration_is_made_of_synthetic_tokens(plugin: None) -> None:
    suite = named("Fitted")
    suite.test_chunking_does_not_change_codes()
    suite.test_calibration_is_asked_for()
    bound = suite.standard()
    wanted = np.sqrt(synthetic_samples(bound.layer).moments.post_key_variance)
    np.testing.assert_allclose(np.array(bound.codec.keys.transform.scale)[:, 0], wanted)


def test_a_method_that_needs_no_calibration_after_all_is_caught(plugin: None) -> None:
    with pytest.raises(LawError, match="without the calibration"):
        named("Silent").test_calibration_is_asked_for()


def test_tables_are_fitted_once_and_apart() -> None:
    calibration = SyntheticCalibration()
    layer, other = LayerSpec(head_dim=16), LayerSpec(head_dim=16, kv_heads=2, query_heads=2)
    first = calibration.tables(Fitted(), layer)
    assert calibration.tables(Fitted(bits=4), layer) is first
    assert calibration.tables(Fitted(frame="pre"), layer) is not first
    assert calibration.tables(Fitted(), other)["keys"].shape == (2, 16)


def test_three_lines_are_a_whole_suite(tmp_path: Path) -> None:
    file = tmp_path / "test_mine.py"
    file.write_text(
        "from kvcompress.testing import MethodConformance\n"
        "from tests.testing.sound import Sound\n\n"
        "class TestMine(MethodConformance):\n    method = Sound\n"
    )
    laws = "fields_are_as_declared or head_sizes or skipped_layers"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(file), "-k", laws],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert "3 passed" in run.stdout, run.stdout + run.stderr


def test_a_suite_without_a_method_says_what_to_set() -> None:
    with pytest.raises(LawError, match=r"MethodConformance: set `method` to the name"):
        _ = MethodConformance().cls
