"""Turn a Llama-type GGUF file into a folder that ``mlx_lm.load`` reads.

The weights are stored as float16 safetensors: exact to 11 bits, half the size of float32, fast on
a GPU. Quantised they would be smaller still, but every matrix product would then run through
kernels that are slow on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx

from kvcompress.errors import UnsupportedModel

CONTROL_TOKEN: Final = 3
"""GGUF's token type for control tokens such as ``<|im_end|>``."""

_TOP_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF file into an existing folder.

    Args:
        gguf: A file of architecture ``llama`` with a byte-level BPE tokenizer.
        folder: Receives ``config.json``, ``model.safetensors``, ``tokenizer.json`` and
            ``tokenizer_config.json``.

    Raises:
        UnsupportedModel: Another architecture, tokenizer or tensor than these.
    """
    tensors, metadata = cast(
        "tuple[dict[str, mx.array], dict[str, Any]]",
        mx.load(str(gguf), format="gguf", return_metadata=True),
    )
    for key, legal in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if metadata.get(key) != legal:
            raise UnsupportedModel(
                f"{gguf.name}: {key} must be {legal!r} (got {metadata.get(key)!r})"
            )
    config = model_config(metadata, tied="output.weight" not in tensors)
    weights = dict(_weights(tensors, config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", tokenizer_json(metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


def model_config(metadata: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """The ``config.json`` of a Llama model, from a GGUF file's metadata.

    Args:
        metadata: GGUF metadata as ``mx.load`` returns it.
        tied: Whether the output layer shares the embedding's weights.
    """

    def number(key: str) -> Any:
        return metadata[key].item()

    heads = number("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.embedding_length") // heads,
        # Stored as float32: six digits give 1e-05 back.
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("llama.rope.freq_base"),
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": number("llama.vocab_size"),
        "tie_word_embeddings": tied,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float16",
    }


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tokenizer.json`` of a byte-level BPE tokenizer that splits digits one by one."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **special}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tokenizer_config.json``: special tokens, chat template, longest input."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]

    def token(kind: str) -> str:
        index: int = metadata[f"tokenizer.ggml.{kind}_token_id"].item()
        return tokens[index]

    return {
        # The generic class takes tokenizer.json as it stands; named ones rebuild the splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _weights(
    tensors: Mapping[str, mx.array], config: Mapping[str, Any]
) -> Iterator[tuple[str, mx.array]]:
    """Yield the weights under their mlx-lm names, dense, in float16."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for name in tensors:
        stem, _, suffix = name.rpartition(".")
        if suffix != "weight":  # the scales and biases of a quantised tensor
            continue
        dense = _dense(tensors, stem)
        part = stem.rpartition(".")[2]
        if part in heads:
            dense = undo_interleave(dense, heads[part])
        yield f"{_mlx_name(stem)}.weight", dense.astype(mx.float16)


def _mlx_name(stem: str) -> str:
    if stem in _TOP_NAMES:
        return _TOP_NAMES[stem]
    match stem.split("."):
        case ["blk", layer, part] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}"
    raise UnsupportedModel(f"the GGUF file holds a tensor that Llama models lack: {stem}")


def _dense(tensors: Mapping[str, mx.array], stem: str) -> mx.array:
    """One tensor in float32, dequantised where MLX read it as weight, scales and biases."""
    weight = tensors[f"{stem}.weight"]
    scales = tensors.get(f"{stem}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    group = 32  # of every GGUF format that MLX keeps quantised
    return mx.dequantize(
        weight,
        scales.astype(mx.float32),
        tensors[f"{stem}.biases"].astype(mx.float32),
        group_size=group,
        bits=weight.shape[-1] // scales.shape[-1],
    )


def undo_interleave(weight: mx.array, heads: int) -> mx.array:
    """Give the rows of a query or key projection back their half-split RoPE order.

    GGUF stores the two halves of each head interleaved, so that neighbouring rows rotate
    together; mlx-lm's Llama rotates row ``i`` with row ``i + D / 2``.

    Args:
        weight: ``(heads * D, C)``.
        heads: Number of heads in the weight.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
