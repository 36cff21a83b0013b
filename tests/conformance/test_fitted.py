"""Every method that is fitted: to its own layer and part, in its own frame, loud channels too."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve

import kvcompress as kv
from kvcompress.calibrate.fitting import fit_layers, measure
from kvcompress.codec import KVCodec
from kvcompress.registry import method_info
from kvcompress.testing import calibration
from kvcompress.testing.calibration import SyntheticCalibration, synthetic_samples
from kvcompress.testing.data import plain_keys, tokens
from kvcompress.testing.oracles import rope
from kvcompress.testing.subject import STANDARD as LAYER

FITTED = ("a2ats", "commvq", "vecinfer")
SAMPLES = synthetic_samples(LAYER)
LOUD = (3, 17, 40)
PAIRS = (3, 35, 17, 49, 40, 8)  # with the channels that RoPE turns them with


def test_the_fitted_methods_are_here() -> None:
    own = [row.name for row in kv.list_methods() if row.distribution == "kvcompress"]
    assert set(FITTED) == {name for name in own if method_info(name).needs_calibration}


def calibrated(name: str, samples: list[Any], **options: Any) -> tuple[kv.Calibration, Any]:
    """A calibration of these layers, and the fit that it holds."""
    fit = fit_layers(kv.get_method(name, **options), samples, 0)
    layers = tuple(s.layer for s in samples)
    recorded = tuple(s.moments for s in samples)
    made = kv.Calibration(layers=layers, recorded=recorded, fits=[fit], provenance={})
    return made, fit


@pytest.mark.parametrize("name", FITTED)
def test_the_codec_errs_as_the_fit_says(name: str) -> None:
    """Tables fitted to other vectors than those that are coded promise what no cache keeps."""
    made, fit = calibrated(name, [SAMPLES])
    found = measure(kv.get_method(name, calibration=made), SAMPLES)
    said = {name.replace("s_", "_"): number for name, number in fit.report[0].items()}
    for part in ("key", "value"):
        left = found[f"{part}_error"] / found[f"{part}_spread"]
        assert left == pytest.approx(said[f"{part}_left"], rel=0.1)
        assert left < 0.25


@pytest.mark.parametrize("name", FITTED)
def test_each_layer_and_part_has_tables_of_its_own(name: str) -> None:
    """Layers that speak differently are coded worse by each other's tables, keys by values'."""
    order = np.random.default_rng(5).permutation(64)
    sizes = np.geomspace(0.2, 5.0, 64).astype(np.float32)
    second = evolve(
        SAMPLES,
        layer=evolve(LAYER, index=1),
        keys=SAMPLES.keys[..., order],
        values=SAMPLES.values * sizes,
    )
    made, fit = calibrated(name, [SAMPLES, second])
    crossed = evolve(made, fits=[evolve(fit, tables={0: fit.tables[1], 1: fit.tables[0]})])
    method = kv.get_method(name, calibration=made)
    for samples in (SAMPLES, second):
        own, other = (measure(evolve(method, calibration=c), samples) for c in (made, crossed))
        for part in ("key", "value"):
            assert own[f"{part}_error"] < 0.8 * other[f"{part}_error"]
    for tables in fit.tables.values():
        keys, values = (
            np.concatenate([t.ravel() for n, t in tables.items() if n.startswith(words)])
            for words in (("key", "turning"), ("value",))
        )
        assert keys.shape != values.shape or not np.array_equal(keys, values)


# -- loud channels ---------------------------------------------------------------------------------


def loud_keys(layer: Any, count: int, *, batch: int = 1, seed: int = 0) -> Any:
    """Keys before RoPE of which a few channels are fifty times the others."""
    keys = plain_keys(layer, count, batch=batch, seed=seed).copy()
    keys[..., LOUD] *= 50
    return keys


@pytest.fixture(scope="module")
def fitted_to_loud() -> dict[str, KVCodec]:
    """Codecs that were fitted to such keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "plain_keys", loud_keys)
        patch.setattr(calibration, "synthetic_samples", synthetic_samples.__wrapped__)
        given = {"calibration": SyntheticCalibration()}
        made = {name: kv.get_method(name, **given).bind(LAYER) for name in FITTED}
        made["not smooth"] = kv.get_method("vecinfer", smooth=False, **given).bind(LAYER)
    return made


def divergence(codec: KVCodec) -> tuple[float, float]:
    """Mean KL of attention by queries that do not see the loud channels; cosine of the keys."""
    keys = mx.array(
        rope(loud_keys(LAYER, 256, seed=5), range(256), LAYER.rotary).astype(np.float32)
    )
    values = tokens(LAYER, 256).values
    constants = codec.begin(keys, values, range(256))
    codes = codec.encode(keys, values, range(256), constants)
    decoded = np.array(codec.decode(codes, range(256))[0], np.float64)
    queries = np.random.default_rng(3).standard_normal((1, 4, 256, 64))
    queries[..., PAIRS] = 0
    queries = rope(queries, range(256), LAYER.rotary)[:, :, -16:].reshape(1, 2, 32, 64)
    true = np.array(keys, np.float64)
    cosine = (true * decoded).sum(-1) / np.linalg.norm(true, axis=-1)
    cosine /= np.linalg.norm(decoded, axis=-1)
    logits = [queries @ x.swapaxes(-1, -2) / 8 for x in (true, decoded)]
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in logits)
    return float((np.exp(p) * (p - q)).sum(-1).mean()), float(np.median(cosine))


@pytest.mark.parametrize("name", FITTED)
def test_loud_channels_are_known_from_the_calibration(
    name: str, fitted_to_loud: dict[str, KVCodec]
) -> None:
    """At one or two bits; a rotation that knows nothing of them needs eight."""
    assert divergence(fitted_to_loud[name])[0] < 0.3


def test_without_its_smoothing_vecinfer_would_be_drowned(
    fitted_to_loud: dict[str, KVCodec],
) -> None:
    found, cosine = divergence(fitted_to_loud["not smooth"])
    assert found > 3
    assert cosine > 0.95  # by which nobody would have noticed


@pytest.mark.parametrize(("name", "ladder"), [("turboquant", (2, 4, 6, 8)), ("affine", (4, 6, 8))])
def test_loud_channels_cost_a_method_without_calibration_bits(
    name: str, ladder: tuple[int, ...]
) -> None:
    found = [divergence(kv.get_method(name, bits=bits).bind(LAYER)) for bits in ladder]
    falling = [kl for kl, _ in found]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.05
    assert falling[0] > 0.5
    assert all(cosine > 0.95 for _, cosine in found)
