from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import UnsupportedModel
from kvcompress.models.gguf import convert_gguf, tokenizer_json, undo_interleave

HEADS, KV_HEADS, D, HIDDEN, VOCABULARY = 4, 2, 8, 32, 270


def byte_alphabet() -> list[str]:
    """The 256 printable characters by which byte-level BPE writes bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + i) for i in range(256 - len(printable))]
    return [chr(code) for code in printable] + others


def metadata() -> dict[str, Any]:
    """GGUF metadata as ``mx.load`` gives it, of a tiny byte-level tokenizer."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    tokens += ["th", "the", "Ġthe", "12", *[f"unused{i}" for i in range(7)]]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(HIDDEN, mx.uint32),
        "llama.feed_forward_length": mx.array(48, mx.uint32),
        "llama.block_count": mx.array(1, mx.uint32),
        "llama.attention.head_count": mx.array(HEADS, mx.uint32),
        "llama.attention.head_count_kv": mx.array(KV_HEADS, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.rope.freq_base": mx.array(10000.0, mx.float32),
        "llama.context_length": mx.array(64, mx.uint32),
        "llama.vocab_size": mx.array(VOCABULARY, mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * (len(tokens) - 3), mx.int32),
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "1 2"],
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, mx.uint32),
        "tokenizer.ggml.padding_token_id": mx.array(2, mx.uint32),
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def interleave(weight: mx.array, heads: int) -> mx.array:
    rows, columns = weight.shape
    return weight.reshape(heads, 2, -1, columns).swapaxes(1, 2).reshape(rows, columns)


def tensors(seed: int = 0) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """GGUF tensors, and the dense mlx-lm weights that they stand for."""
    keys = iter(mx.random.split(mx.random.key(seed), 16))
    shapes = {
        "attn_q": ("self_attn.q_proj", (HEADS * D, HIDDEN)),
        "attn_k": ("self_attn.k_proj", (KV_HEADS * D, HIDDEN)),
        "attn_v": ("self_attn.v_proj", (KV_HEADS * D, HIDDEN)),
        "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * D)),
        "ffn_gate": ("mlp.gate_proj", (48, HIDDEN)),
        "ffn_up": ("mlp.up_proj", (48, HIDDEN)),
        "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
        "attn_norm": ("input_layernorm", (HIDDEN,)),
    }
    stored: dict[str, mx.array] = {}
    dense: dict[str, mx.array] = {}
    for part, (name, shape) in shapes.items():
        weight = mx.random.normal(shape, key=next(keys))
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        stored[f"blk.0.{part}.weight"] = weight if heads is None else interleave(weight, heads)
        dense[f"model.layers.0.{name}.weight"] = weight
    for part, name, shape in (
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj", (HIDDEN, 48)),
        ("output_norm", "model.norm", (HIDDEN,)),
    ):
        stored[f"{part}.weight"] = dense[f"{name}.weight"] = mx.random.normal(shape, key=next(keys))
    packed, scales, biases = mx.quantize(
        mx.random.normal((VOCABULARY, HIDDEN), key=next(keys)), group_size=32, bits=8
    )
    stored |= {
        "token_embd.weight": packed,
        "token_embd.scales": scales.astype(mx.float16),
        "token_embd.biases": biases.astype(mx.float16),
    }
    dense["model.embed_tokens.weight"] = mx.dequantize(
        packed,
        scales.astype(mx.float16).astype(mx.float32),
        biases.astype(mx.float16).astype(mx.float32),
        group_size=32,
        bits=8,
    )
    return stored, dense


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the reader of GGUF files returns; tests may change it."""
    found: dict[str, Any] = {"tensors": tensors()[0], "metadata": metadata()}
    real = mx.load

    def load(path: str, format: str | None = None, return_metadata: bool = False) -> Any:  # noqa: A002
        if format == "gguf":
            return found["tensors"], found["metadata"]
        return real(path, format=format, return_metadata=return_metadata)

    monkeypatch.setattr(mx, "load", load)
    return found


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (3, 4), (9, 64)])
def test_undo_interleave_inverts_the_interleaving(heads: int, size: int) -> None:
    weight = mx.arange(heads * size * 5).reshape(heads * size, 5)
    back = undo_interleave(interleave(weight, heads), heads)
    assert mx.array_equal(back, weight)


def test_undone_rows_rotate_as_interleaved_ones_did() -> None:
    """Half-split rotation of the restored rows is the traditional rotation of the stored ones."""
    weight = mx.random.normal((D, HIDDEN), key=mx.random.key(0))
    x = mx.random.normal((6, HIDDEN), key=mx.random.key(1))

    def rotated(rows: mx.array, traditional: bool) -> mx.array:
        keys = (x @ rows.T)[None, None]
        return mx.fast.rope(keys, D, traditional=traditional, base=1e4, scale=1.0, offset=3)[0, 0]

    one = rotated(weight, traditional=True)
    other = rotated(undo_interleave(weight, 1), traditional=False)
    np.testing.assert_allclose(one @ one.T, other @ other.T, rtol=1e-4, atol=1e-4)


def test_the_folder_loads_with_mlx_lm_and_holds_the_weights(
    read: dict[str, Any], tmp_path: Path
) -> None:
    convert_gguf(Path("tiny.gguf"), tmp_path)
    import mlx_lm
    from mlx.utils import tree_flatten

    model, tokenizer = mlx_lm.load(str(tmp_path))
    loaded = dict(tree_flatten(model.parameters()))
    expected = tensors()[1]
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        assert mx.array_equal(loaded[name], weight.astype(mx.float16)), name
    assert model.args.rms_norm_eps == 1e-5
    assert model.args.tie_word_embeddings
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.apply_chat_template([{"content": "the"}], tokenize=False) == "the"


def test_an_output_layer_of_its_own_is_kept(read: dict[str, Any], tmp_path: Path) -> None:
    read["tensors"]["output.weight"] = mx.ones((VOCABULARY, HIDDEN))
    convert_gguf(Path("tiny.gguf"), tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" in mx.load(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "gpt2"),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.pre", "llama-bpe"),
    ],
)
def test_refuses_what_it_cannot_convert(
    read: dict[str, Any], tmp_path: Path, key: str, value: str
) -> None:
    read["metadata"][key] = value
    with pytest.raises(UnsupportedModel, match=f"{key} must be .* \\(got '{value}'\\)"):
        convert_gguf(Path("tiny.gguf"), tmp_path)


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "rope_freqs.weight"])
def test_refuses_a_foreign_tensor(read: dict[str, Any], tmp_path: Path, name: str) -> None:
    read["tensors"][name] = mx.ones((4,))
    with pytest.raises(UnsupportedModel, match=name.removesuffix(".weight")):
        convert_gguf(Path("tiny.gguf"), tmp_path)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_tokens_give_any_text_back(text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(metadata())))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_control_tokens_stay_whole() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(metadata())))
    assert tokenizer.encode("the 12<|im_end|>").tokens == ["the", "Ġ", "1", "2", "<|im_end|>"]


@pytest.mark.model
def test_the_real_tokenizer_gives_text_back(demo: tuple[Any, Any]) -> None:
    tokenizer = demo[1]
    text = "It's 12,345.67 km — naïve café, 東京 😀\r\n\n  def f(x):\n\treturn x ** 2  ½²\x00"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("1984")[-4:] == [tokenizer.encode(digit)[0] for digit in "1984"]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.model
def test_the_real_model_writes_sense(demo: tuple[Any, Any]) -> None:
    import mlx_lm

    model, tokenizer = demo
    text = mlx_lm.generate(model, tokenizer, "The capital of France is", max_tokens=4)
    assert "Paris" in text
