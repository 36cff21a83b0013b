from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from kvcompress.errors import ConfigError, UnsupportedModel
from kvcompress.models import load
from kvcompress.models.load import LoadedModel, load_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)


def write_model(
    folder: Path, dtype: mx.Dtype = mx.float16, seed: int = 0, bits: int | None = None
) -> Path:
    """Save a tiny random Llama with a tokenizer, as an mlx-lm folder."""
    from mlx_lm.models.llama import Model, ModelArgs
    from tokenizers import Tokenizer, models

    mx.random.seed(seed)
    folder.mkdir()
    config: dict[str, Any] = dict(CONFIG)
    model = Model(ModelArgs.from_dict(CONFIG))
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "b"})
    )
    return folder


def dtypes(loaded: LoadedModel) -> set[str]:
    return {
        str(parameter.dtype).removeprefix("mlx.core.")
        for _, parameter in tree_flatten(loaded.model.parameters())
    }


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_cpu_gets_float32(tmp_path: Path, no_gpu: None, dtype: mx.Dtype) -> None:
    loaded = load_model(str(write_model(tmp_path / "m", dtype)))
    assert dtypes(loaded) == {"float32"}
    assert loaded.dtype == "float32"
    assert loaded.name == loaded.source == str(tmp_path / "m")
    assert loaded.tokenizer.encode("ab") == [0, 1]


def test_a_gpu_keeps_the_models_own_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert load_model(str(folder)).dtype == "float16"


@pytest.mark.parametrize("dtype", load.DTYPES)
def test_a_type_that_is_asked_for_is_used(tmp_path: Path, no_gpu: None, dtype: str) -> None:
    loaded = load_model(str(write_model(tmp_path / "m")), dtype)
    assert dtypes(loaded) == {dtype}
    assert loaded.dtype == dtype


def test_parameters_that_a_model_exempts_are_not_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models.llama import Model

    monkeypatch.setattr(
        Model,
        "cast_predicate",
        property(lambda self: lambda name: "norm" not in name),
        raising=False,
    )
    loaded = load_model(str(write_model(tmp_path / "m", mx.float32)), "float16")
    assert loaded.model.model.norm.weight.dtype == mx.float32
    assert loaded.dtype == "float16"


def test_another_thread_can_run_the_model(tmp_path: Path, no_gpu: None) -> None:
    loaded = load_model(str(write_model(tmp_path / "m")))
    with ThreadPoolExecutor(1) as pool:
        logits = pool.submit(lambda: loaded.model(mx.array([[1, 2]])).tolist()).result()
    assert len(logits[0]) == 2


def test_packed_weights_stay_and_compute_the_same(tmp_path: Path, no_gpu: None) -> None:
    folder = write_model(tmp_path / "m", mx.float32, bits=4)
    loaded = load_model(str(folder))
    assert dtypes(loaded) == {"uint32", "float32"}
    stored = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj"
    layer = loaded.model.layers[0].mlp.up_proj
    assert mx.array_equal(layer.weight, stored[f"{name}.weight"])
    x = mx.random.normal((1, 64), key=mx.random.key(0))
    dense = mx.dequantize(
        stored[f"{name}.weight"],
        stored[f"{name}.scales"],
        stored[f"{name}.biases"],
        group_size=32,
        bits=4,
    )
    assert mx.allclose(layer(x), x @ dense.T, atol=1e-5)


def test_the_fingerprint_tells_weights_apart_but_not_types(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    one = load_model(str(folder), "float32").fingerprint
    assert load_model(str(folder), "bfloat16").fingerprint == one
    assert load_model(str(write_model(tmp_path / "other", seed=1))).fingerprint != one
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    assert load_model(str(folder)).fingerprint != one


@pytest.mark.parametrize("name", ["absent", "/absent/model", "./absent", "a/b/c", "", " "])
def test_a_name_that_is_nothing_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="neither 'smollm2-135m', nor a folder"):
        load_model(name)


def test_a_file_is_refused_with_what_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"is a file; give the folder"):
        load_model(str(tmp_path / "model.gguf"))


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"could not load it \(FileNotFoundError") as caught:
        load_model(str(tmp_path))
    assert caught.value.__cause__ is not None


def test_a_hub_name_goes_to_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx_lm

    asked = []

    def refuse(source: str, **_: object) -> None:
        asked.append(source)
        raise OSError("no network")

    monkeypatch.setattr(mlx_lm, "load", refuse)
    with pytest.raises(UnsupportedModel, match=r"'owner/model-1\.5'.*no network"):
        load_model("owner/model-1.5")
    assert asked == ["owner/model-1.5"]


def test_an_illegal_type_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"dtype must be one of .*float16.* \(got 'int8'\)"):
        load_model("absent", "int8")


@pytest.mark.model
def test_the_embedded_model_is_the_default() -> None:
    loaded = load_model(dtype="float16")
    assert loaded.name == "smollm2-135m"
    assert Path(loaded.source).is_dir()
    assert len(loaded.model.layers) == 30
    assert loaded.dtype == "float16"
