"""A tiny model, a tokenizer of bytes, and a method that calibrates without clustering."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from attrs import frozen

from kvcompress import Method, MethodInfo, hookimpl
from kvcompress.calibrate import Calibration, LayerSamples, calibration_of
from kvcompress.calibrate.fitting import fit_layers
from kvcompress.calibrate.recorder import LayerRecorder
from kvcompress.codec import KVCodec, Pipeline
from kvcompress.config import integer
from kvcompress.layers import LayerSpec, Rotary
from kvcompress.method import calibration_field
from kvcompress.schema import Field
from kvcompress.stages.base import DecodingCoder, Fields
from kvcompress.stages.centre import fixed_centre
from tests.stand_ins import Same

PROSE = (
    "The harbour lay quiet in the early light, and the gulls had not yet begun their noise. "
    "A single boat, its paint long gone, moved against the wall with the tide. "
    "Nobody had owned it for years; the children said that it belonged to the sea.\n"
) * 20


class ByteTokenizer:
    """One token a byte, and, if asked for, a first token of the model's own."""

    def __init__(self, first: int | None = None) -> None:
        self.first = [] if first is None else [first]

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        return [*(self.first if add_special_tokens else []), *text.encode()]


def tiny_llama(seed: int = 0, **options: Any) -> Any:
    """Two layers, four query heads on two KV heads of eight channels."""
    from mlx_lm.models import llama

    sizes: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 256,
        "rope_theta": 1000.0,
    }
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(**{**sizes, **options}))
    mx.eval(model.parameters())
    return model


class Grid(DecodingCoder):
    """Whole multiples of each channel's own step."""

    table_bytes = 0

    def __init__(self, steps: np.ndarray) -> None:
        self.steps = mx.array(steps.astype(np.float32))[None, :, None, :]
        mx.eval(self.steps)

    @property
    def fields(self) -> tuple[Field, ...]:
        _, heads, _, width = self.steps.shape
        return (Field("steps", "float32", width, heads, 32 * width),)

    def encode(self, z: mx.array) -> dict[str, mx.array]:
        return {"steps": mx.round(z / self.steps)}

    def decode(self, fields: Fields) -> mx.array:
        return fields["steps"] * self.steps


@frozen(kw_only=True)
class Peak(Method):
    """Steps from each channel's largest magnitude."""

    name: ClassVar[str] = "peak"
    fit_options: ClassVar[tuple[str, ...]] = ("bits",)

    bits: int = integer(8, low=1, high=8, help="Bits per value.")
    centroids: int = integer(0, low=0, help="As if so many were fitted.")
    calibration: Calibration | None = calibration_field()

    def fit(self, samples: LayerSamples, *, seed: int) -> dict[str, np.ndarray]:
        levels = 2.0 ** (self.bits - 1)
        return {
            "key_steps": np.maximum(2 * samples.moments.post_key_max / levels, 1e-3),
            "value_steps": np.maximum(samples.moments.value_max / levels, 1e-3).astype(np.float16),
            "drawn": np.random.default_rng(seed).random(3),
            "report.dead_centroids": np.array(self.bits),
        }

    def bind(self, layer: LayerSpec) -> KVCodec:
        calibration = calibration_of(self)
        tables, moments = calibration.tables(self, layer), calibration.moments(layer)
        return KVCodec(
            layer,
            Pipeline(
                Same(layer.head_dim), Grid(tables["key_steps"]), fixed_centre(moments.key_mean)
            ),
            Pipeline(Same(layer.value_dim), Grid(tables["value_steps"])),
        )


@frozen(kw_only=True)
class Plain(Method):
    """A method that fits nothing."""

    name: ClassVar[str] = "plain"

    def bind(self, layer: LayerSpec) -> KVCodec:
        raise NotImplementedError


class PeakPlugin:
    """Offers :class:`Peak`, as a plugin registered by hand."""

    @hookimpl
    def kvcompress_register(self, registry: Any) -> None:
        registry.add(MethodInfo("peak", "A toy.", "tests.calibrate.fakes:Peak"))


LAYERS = tuple(LayerSpec(index, 2, 4, 8, 6, "float32", Rotary(8, base=1000.0)) for index in (0, 2))


def samples_of(layer: LayerSpec, count: int = 200) -> LayerSamples:
    """Samples of made-up keys, values and queries."""
    recorder = LayerRecorder(layer)
    parts = mx.random.split(mx.random.key(layer.index), 3)
    keys = mx.random.normal((1, layer.kv_heads, count, layer.head_dim), key=parts[0]) + 1
    values = mx.random.normal((1, layer.kv_heads, count, layer.value_dim), key=parts[1])
    queries = mx.random.normal((1, layer.query_heads, count, layer.head_dim), key=parts[2])
    chosen = np.arange(4, count)
    recorder.add_tokens(keys, values, 0, chosen)
    recorder.add_queries(queries, 0, chosen)
    return recorder.finish()


def calibration(
    *methods: Any, layers: tuple[LayerSpec, ...] = LAYERS, seed: int = 0, **provenance: Any
) -> Calibration:
    """A calibration of made-up samples."""
    samples = [samples_of(layer) for layer in layers]
    return Calibration(
        layers=layers,
        recorded=tuple(one.moments for one in samples),
        fits=[fit_layers(method, samples, seed) for method in methods],
        provenance={"text": {"name": "made up"}, "tokens": 200, "seed": seed, **provenance},
    )
