"""Tiny random models of mlx-lm's families, for tests that must hold for all of them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

# Read by whichever family declares the field; a family's own table comes after.
_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "hidden_act": "silu",
    "sliding_window": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "partial_rotary_factor": 0.5,
}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 4,
}
_MULTIPLIERS = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

# What a family needs beyond the common fields. Only families that run in full on a CPU.
FAMILIES: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 3,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 2.0,
    },
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {
        "sliding_window_layers": [1, 3],
        "conv_window": 2,
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "cohere": {},
    "cohere2": {"sliding_window_pattern": 4},
    "dbrx": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
    "ernie4_5": {},
    "exaone": {"num_layers": 4},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LLLG"},
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
    },
    "gemma": {},
    "gemma2": {},
    "gemma3": {
        "text_config": {
            **_COMMON,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 16,
            "sliding_window_pattern": 2,
        }
    },
    "gemma3_text": {
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 3,
    },
    "gemma3n": {
        "text_config": {
            **_COMMON,
            "model_type": "gemma3n",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "rope_local_base_freq": 1000.0,
            "rope_scaling": None,
            "final_logit_softcapping": 30.0,
            "query_rescale_scalar": 1.0,
            "laurel_rank": 8,
        }
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "sliding_window_pattern": 2,
    },
    "glm": {},
    "glm4": {},
    "gpt2": {"n_ctx": 4096, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 4096},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_inner": 96, "n_head": 4, "n_positions": 4096},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25, "num_attention_heads": 4},
    "gpt_oss": {"layer_types": _ALTERNATING, "rope_scaling": None},
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    "granitemoehybrid": {
        **_MULTIPLIERS,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
    },
    "helium": {},
    "hunyuan": {
        "moe_topk": 1,
        "num_experts": 1,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": False,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {},
    "internlm2": {},
    "internlm3": {"bias": False, "qkv_bias": False},
    "iquestloopcoder": {},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 9,
        "expert_layer_period": 10,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
    },
    "lfm2": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "llama": {"sliding_window": None},
    "llama4": {
        "text_config": {
            **_COMMON,
            "model_type": "llama4_text",
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "mimo": {},
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 12},
    "minicpm3": {
        **_LATENT,
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "scale_emb": 12,
        "rope_scaling": {"original_max_position_embeddings": 2048},
    },
    "mixtral": {},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "olmo2": {},
    "olmo3": {"layer_types": _ALTERNATING},
    "olmoe": {},
    "phi": {},
    "phi3": {},
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "intermediate_size": 96,
        "full_attention_idx": [1, 3],
    },
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {**_LINEAR, "full_attention_interval": 2},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
        "lru_width": 64,
    },
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"use_qkv_bias": False, "qk_layernorm": False},
    "starcoder2": {},
    "telechat3": {},
}


def tiny(family: str, **overrides: Any) -> nn.Module:
    """Build a seeded float32 model of a family with about 100,000 parameters.

    Args:
        family: A key of :data:`FAMILIES`.
        overrides: Fields of the family's ``ModelArgs``.
    """
    module = importlib.import_module(f"mlx_lm.models.{family}")
    known = inspect.signature(module.ModelArgs).parameters
    fields = {k: v for k, v in _COMMON.items() if k in known} | FAMILIES[family] | overrides
    if "model_type" in known:
        fields.setdefault("model_type", family)
    mx.random.seed(7)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(fields))
    model.update(tree_map(_as_float32, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _as_float32(x: mx.array) -> mx.array:
    return x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x


def logits(model: nn.Module, tokens: mx.array, caches: list[Any] | None = None) -> mx.array:
    """The model's logits, ``(B, L, vocabulary)``, whatever it wraps them in."""
    out = model(tokens, cache=caches)
    return getattr(out, "logits", out)
