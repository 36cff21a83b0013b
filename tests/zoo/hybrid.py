"""Families with recurrent or convolutional layers, alone or beside attention."""

from __future__ import annotations

from typing import Any

from tests.zoo.common import COMMON, LINEAR, MULTIPLIERS, wrapped

_QWEN35 = {
    **LINEAR,
    "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
_LFM2 = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
}
HYBRID: dict[str, dict[str, Any]] = {
    "baichuan_m1": {
        "sliding_window_layers": [1, 3],
        "conv_window": 2,
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "bailing_moe_linear": {"first_k_dense_replace": 1, "layer_group_size": 2, "group_norm_size": 2},
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
    },
    "granitemoehybrid": {
        **MULTIPLIERS,
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
    "lfm2": _LFM2,
    "lfm2-vl": {
        "model_type": "lfm2-vl",
        "text_config": {
            **COMMON,
            **_LFM2,
            "model_type": "lfm2",
        },
    },
    "lfm2_moe": {
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1, 3],
    },
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4},
    "mamba2": {
        "num_heads": 4,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
        "head_dim": 32,
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_conv_bias": True,
        "hybrid_override_pattern": "M*-*",
    },
    "olmo_hybrid": {
        **LINEAR,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "intermediate_size": 96,
        "full_attention_idx": [1, 3],
    },
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.1.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            }
        ],
        **wrapped("qwen3_5_text", num_experts=0, intermediate_size=128, **_QWEN35),
    },
    "qwen3_5": wrapped("qwen3_5_text", num_experts=0, **_QWEN35),
    "qwen3_5_moe": wrapped("qwen3_5_moe_text", **_QWEN35),
    "qwen3_next": {**LINEAR, "full_attention_interval": 2},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
        "lru_width": 64,
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "head_dim": 32,
    },
}
