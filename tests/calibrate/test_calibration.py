from __future__ import annotations

import math
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvcompress.calibrate.calibration import Calibration
from kvcompress.errors import CalibrationMismatch, CalibrationRequired
from kvcompress.layers import LayerSpec, Rotary
from tests.calibrate.fakes import LAYERS, Peak, Plain, calibration, samples_of


def test_tables_and_moments_are_those_of_the_layer() -> None:
    made = calibration(Peak(), Peak(bits=4))
    for layer in LAYERS:
        moments = samples_of(layer).moments
        np.testing.assert_array_equal(made.moments(layer).key_mean, moments.key_mean)
        for bits in (4, 8):
            tables = made.tables(Peak(bits=bits), layer)
            assert set(tables) == {"key_steps", "value_steps", "drawn"}
            expected = 2 * moments.post_key_max / 2 ** (bits - 1)
            np.testing.assert_allclose(tables["key_steps"], expected, rtol=1e-6)


def test_nothing_in_it_can_be_written(tmp_path: Path) -> None:
    made = calibration(Peak())
    made.save(tmp_path / "cal")
    for one in (made, Calibration.load(tmp_path / "cal")):
        assert not any(array.flags.writeable for _, array in one.arrays())
        with pytest.raises(ValueError, match="read-only"):
            one.tables(Peak(), LAYERS[0])["key_steps"][0] = 0


def test_options_outside_fit_options_do_not_matter() -> None:
    made = calibration(Peak())
    assert made.tables(Peak(window=7, centroids=3), LAYERS[0])


def test_a_method_without_tables_names_the_command() -> None:
    with pytest.raises(CalibrationRequired, match=r"no tables for it \(methods: none\)") as caught:
        calibration().tables(Peak(bits=3), LAYERS[0])
    assert "kvcompress calibrate --method peak:bits=3 --model MODEL --out" in str(caught.value)
    with pytest.raises(CalibrationRequired, match=r"\(methods: peak\)"):
        calibration(Peak()).tables(Plain(), LAYERS[0])


def test_other_options_are_named() -> None:
    made = calibration(Peak(bits=8), Peak(bits=2))
    with pytest.raises(
        CalibrationMismatch,
        match="peak: the calibration was fitted for bits=2, asked for bits=4; run: "
        "kvcompress calibrate --method peak:bits=4",
    ):
        made.tables(Peak(bits=4), LAYERS[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_heads": 4}, "kv_heads 2 in the calibration, 4 in the model"),
        ({"query_heads": 8}, "query_heads 4 in the calibration, 8 in the model"),
        ({"head_dim": 16}, "head_dim 8 in the calibration, 16 in the model"),
        ({"value_dim": 8}, "value_dim 6 in the calibration, 8 in the model"),
        ({"rotary": None}, r"rope \(8 channels, base 1000, scale 1\) in the calibration, none in"),
        ({"rotary": Rotary(8, base=1e4)}, r"none|base 10000, scale 1\) in the model"),
        ({"rotary": Rotary(8, base=1000.0, scale=0.5)}, r"scale 0\.5\) in the model"),
        ({"rotary": Rotary(8, True, 1000.0)}, r"scale 1, traditional\) in the model"),
        ({"rotary": Rotary(4, base=1000.0)}, r"4 channels, base 1000, scale 1\) in the model"),
        ({"index": 1}, r"has no layer 1 \(it has 0, 2\)"),
    ],
)
def test_another_layer_is_named(change: dict[str, object], words: str) -> None:
    made = calibration(Peak())
    layer = attrs.evolve(LAYERS[0], **change)
    with pytest.raises(CalibrationMismatch, match=words):
        made.tables(Peak(), layer)
    with pytest.raises(CalibrationMismatch, match=words):
        made.moments(layer)


def test_whether_a_rotation_is_known_counts() -> None:
    layer = LayerSpec(0, 2, 4, 8, 6, "float32", None, rotary_known=True)
    made = calibration(layers=(layer,))
    with pytest.raises(CalibrationMismatch, match="known in only one"):
        made.moments(attrs.evolve(layer, rotary_known=False))


def test_dtype_and_the_rounding_of_frequencies_do_not_count() -> None:
    exact = Rotary(8, base=1000.0)
    freqs = tuple(1 / exact.angles * (1 + 1e-7))
    made = calibration(Peak())
    same = attrs.evolve(LAYERS[0], dtype="bfloat16", rotary=Rotary(8, base=None, freqs=freqs))
    assert made.tables(Peak(), same)
    still = (math.inf, *freqs[1:])
    with pytest.raises(CalibrationMismatch, match="custom frequencies"):
        made.moments(attrs.evolve(same, rotary=Rotary(8, base=None, freqs=still)))


def test_the_fingerprint_follows_the_contents_and_not_where_they_came_from() -> None:
    made = calibration(Peak())
    assert made.fingerprint == calibration(Peak(), text="another").fingerprint
    prints = {
        made.fingerprint,
        calibration().fingerprint,
        calibration(Peak(bits=4)).fingerprint,
        calibration(Peak(), seed=1).fingerprint,
        calibration(Peak(), layers=LAYERS[:1]).fingerprint,
    }
    assert len(prints) == 5


def test_a_method_takes_it_and_its_fingerprint() -> None:
    made = calibration(Peak())
    assert Peak(calibration=made).fingerprint != Peak().fingerprint
    assert Peak(calibration=made) == Peak(calibration=calibration(Peak()))


def test_subset_and_merged_are_each_others_inverse() -> None:
    both = calibration(Peak(), Peak(bits=4))
    one, other = both.subset([Peak()]), both.subset([Peak(bits=4)])
    assert [fit.key.values for fit in one.fits] == [{"bits": 8}]
    assert other.merged(one).fingerprint == both.fingerprint
    assert both.subset([]).fits == ()
    with pytest.raises(CalibrationMismatch, match="only calibrations of the same model"):
        one.merged(calibration(Peak(bits=4), seed=3))


def test_its_text_names_what_it_holds() -> None:
    assert repr(calibration(Peak())) == "Calibration(2 layers; peak bits=8)"
    assert repr(calibration()) == "Calibration(2 layers; moments only)"
    assert isinstance(calibration(), Calibration)
