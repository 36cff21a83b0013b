from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from kvcompress import get_method, registry
from kvcompress.calibrate.calibration import Calibration
from kvcompress.calibrate.file import METADATA_KEY, check_writable, load_calibration, to_bytes
from kvcompress.calibrate.header import header_of
from kvcompress.calibrate.samples import LayerMoments
from kvcompress.errors import CalibrationMismatch, ConfigError
from kvcompress.layers import Rotary
from tests.calibrate.fakes import LAYERS, Peak, PeakPlugin, calibration

WRITE = """
import sys
from tests.calibrate.fakes import Peak, calibration
calibration(Peak(), Peak(bits=4)).save(sys.argv[1])
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cal.safetensors"


def test_what_is_saved_is_what_is_loaded(path: Path) -> None:
    freqs = (1.5, 7.25, 33.1, float("inf"))
    layers = (*LAYERS, attrs.evolve(LAYERS[0], index=5, rotary=Rotary(8, base=None, freqs=freqs)))
    made = calibration(Peak(), Peak(bits=4), layers=layers)
    made.save(path)
    loaded = Calibration.load(path)
    assert loaded.layers == made.layers
    assert loaded.provenance == made.provenance
    assert [fit.key for fit in loaded.fits] == [fit.key for fit in made.fits]
    assert [fit.report for fit in loaded.fits] == [fit.report for fit in made.fits]
    assert loaded.fingerprint == made.fingerprint
    for layer in layers:
        for attribute in attrs.fields(LayerMoments):
            ours, theirs = (getattr(c.moments(layer), attribute.name) for c in (made, loaded))
            np.testing.assert_array_equal(ours, theirs)
        ours, theirs = (c.tables(Peak(), layer) for c in (made, loaded))
        assert {name: a.dtype for name, a in ours.items()} == {
            name: a.dtype for name, a in theirs.items()
        }
        assert theirs["value_steps"].dtype == np.float16
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
    assert to_bytes(loaded) == to_bytes(made) == path.read_bytes()


def test_more_than_ten_methods_keep_their_tables_apart(path: Path) -> None:
    methods = [Peak(bits=bits) for bits in range(1, 9)]
    made = calibration(*methods, *(Peak(bits=b, window=1) for b in (1, 2)))
    fits = [*made.fits, *(attrs.evolve(f, key=attrs.evolve(f.key, method="z")) for f in made.fits)]
    attrs.evolve(made, fits=fits).save(path)
    loaded = load_calibration(path)
    assert len(loaded.fits) == 20
    for method in methods:
        for layer in LAYERS:
            ours = made.tables(method, layer)["key_steps"]
            np.testing.assert_array_equal(loaded.tables(method, layer)["key_steps"], ours)


def test_a_method_reads_the_file_by_its_path(path: Path) -> None:
    calibration(Peak()).save(path)
    plugin = PeakPlugin()
    registry.register(plugin)
    try:
        method = get_method("peak", calibration=str(path))
        assert method.bind(LAYERS[0]).layer == LAYERS[0]
    finally:
        registry.unregister(plugin)


def test_the_bytes_do_not_depend_on_the_process(tmp_path: Path) -> None:
    files = []
    for seed in ("0", "1", "4242"):
        files.append(tmp_path / seed)
        subprocess.run(
            [sys.executable, "-c", WRITE, str(files[-1])],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
        )
    assert len({file.read_bytes() for file in files}) == 1


def test_the_header_is_json_that_any_reader_takes(path: Path) -> None:
    infinite = Rotary(8, base=None, freqs=(1.0, 2.0, 3.0, float("inf")))
    made = calibration(Peak(), layers=(attrs.evolve(LAYERS[0], rotary=infinite),))
    header = json.loads(header_of(made), parse_constant=lambda name: pytest.fail(name))
    assert header["layers"][0]["rotary"]["freqs"][-1] is None
    assert header["methods"][0]["report"]["0"] == {"dead_centroids": 8.0}


def test_the_file_appears_at_once_and_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calibration()
    made.save(path)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match=r"cannot be written .No space left"):
            calibration(Peak()).save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        calibration().save(tmp_path / "missing" / "cal.safetensors")
    with pytest.raises(ConfigError, match=r"folder .*missing is missing"):
        check_writable(tmp_path / "missing" / "cal.safetensors")
    with pytest.raises(ConfigError, match="is a folder"):
        check_writable(tmp_path)
    check_writable(tmp_path / "cal.safetensors")


def test_no_such_file(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*cal\.safetensors; make one with"):
        load_calibration(path)


@pytest.mark.parametrize("kept", [0, 7, 8, 200, -1, -1000])
def test_a_cut_file_is_told(path: Path, kept: int) -> None:
    path.write_bytes(to_bytes(calibration(Peak()))[:kept])
    with pytest.raises(ConfigError, match="is not a calibration file, or it is damaged"):
        load_calibration(path)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "mlx"},
        {METADATA_KEY: "not JSON"},
        {METADATA_KEY: "[1, 2]"},
        {METADATA_KEY: "{}"},
        {METADATA_KEY: '{"format": 1}'},
        {METADATA_KEY: '{"format": 1, "layers": [{"rotary": 3}], "counts": [], "methods": []}'},
    ],
)
def test_a_foreign_file_is_told(path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"a": np.zeros(3)}, path, metadata=metadata)
    with pytest.raises(ConfigError, match="is not a calibration file, or it is damaged"):
        load_calibration(path)


@pytest.mark.parametrize("place", [-1, -1000])
def test_a_changed_bit_is_told(path: Path, place: int) -> None:
    contents = bytearray(to_bytes(calibration(Peak())))
    contents[place] ^= 1
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=r"damaged \(ValueError: not what was written to it\)"):
        load_calibration(path)


def test_a_file_from_before_fingerprints_is_read(path: Path) -> None:
    made = calibration(Peak())
    header = json.loads(header_of(made))
    del header["fingerprint"]
    arrays = {name: np.array(array, order="C") for name, array in made.arrays()}
    path.write_bytes(save(arrays, metadata={METADATA_KEY: json.dumps(header)}))
    assert load_calibration(path).fingerprint == made.fingerprint


def test_a_missing_array_is_told(path: Path) -> None:
    made = calibration(Peak())
    made.save(path)
    arrays = load_file(path)
    del arrays["moments.2.value_mean"]
    path.write_bytes(save(arrays, metadata={METADATA_KEY: header_of(made)}))
    with pytest.raises(ConfigError, match=r"damaged \(KeyError: 'moments\.2\.value_mean'\)"):
        load_calibration(path)


@pytest.mark.parametrize("name", ["key_mean", "value_max", "query_moment"])
@pytest.mark.parametrize("kind", ["nan", "heads", "channels", "dtype"])
def test_moments_that_cannot_be_are_told(path: Path, name: str, kind: str) -> None:
    made = calibration(Peak())
    made.save(path)
    arrays, whole = load_file(path), f"moments.2.{name}"
    given = arrays[whole]
    arrays[whole] = {
        "nan": given * np.float32("nan"),
        "heads": np.concatenate([given] * 3),
        "channels": given[..., 1:].copy(),
        "dtype": given.astype(np.int32),
    }[kind]
    path.write_bytes(save(arrays, metadata={METADATA_KEY: header_of(made)}))
    with pytest.raises(ConfigError, match=rf"damaged \(ValueError: {whole} must be finite float32"):
        load_calibration(path)


def test_another_format_is_a_mismatch(path: Path) -> None:
    save_file({"a": np.zeros(3)}, path, metadata={METADATA_KEY: '{"format": 99}'})
    with pytest.raises(CalibrationMismatch, match="has format 99, this version reads 1"):
        load_calibration(path)
