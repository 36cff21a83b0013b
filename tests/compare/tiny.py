"""A folder with a random two-layer model and a tokenizer, as mlx-lm loads it."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}


def save_tiny_model(folder: Path, *, weights: bool = True) -> Path:
    """Write ``config.json``, the tokenizer and, if wanted, ``model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    _save_tokenizer(folder)
    if weights:
        _save_weights(folder)
    return folder


def _save_weights(folder: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(CONFIG))
    # Larger weights than usual give attention that prefers some tokens to others.
    weights = {
        name: (5 * weight if "self_attn" in name else weight).astype(mx.float16)
        for name, weight in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from kvcompress.text import load_text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([load_text("prose-eval").content], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[reply]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
