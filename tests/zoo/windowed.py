"""Families with sliding windows or chunks of attention beside full attention, or shared caches."""

from __future__ import annotations

from typing import Any

from tests.zoo.common import ALTERNATING, COMMON, wrapped

_SHARED = {
    **COMMON,
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "sliding_window_pattern": 2,
}
WINDOWED: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": ALTERNATING},
    "cohere2": {"sliding_window_pattern": 4},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LLLG"},
    "exaone_moe": {"layer_types": ALTERNATING, "is_moe_layer": [False, True] * 2},
    "gear": {"layer_types": ALTERNATING},
    "gemma3": {
        "text_config": {
            **COMMON,
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
            **COMMON,
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
    "gemma4": {"text_config": _SHARED},
    "gemma4_text": _SHARED,
    "gpt_oss": {"layer_types": ALTERNATING, "rope_scaling": None},
    "laguna": {"layer_types": ALTERNATING},
    "llama4": {
        "text_config": {
            **COMMON,
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
    "mellum": {
        "layer_types": ALTERNATING,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "muse_glimmer": {"layer_types": ALTERNATING},
    "muse_spark": wrapped(
        "muse_spark_text",
        post_norm_eps=1e-8,
        rope_parameters={"rope_theta": 10000.0},
        layer_rope_theta=[10000.0] * 4,
        layer_types=ALTERNATING,
        final_logit_softcapping=20.0,
        output_multiplier=0.2,
        moe_hidden_size=64,
        num_shared_experts=0,
        mlp_layer_types=["sparse"] * 4,
    ),
    "olmo3": {"layer_types": ALTERNATING},
    "plamo3": {"window_size": 8, "sliding_window_pattern": 2},
    "spark2_5": {
        "hidden_act": "gelu",
        "layer_types": ALTERNATING,
        "rope_parameters": {
            "full_attention": {"rope_theta": 10000.0},
            "sliding_attention": {"rope_theta": 1000.0},
        },
    },
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": ALTERNATING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "2,3",
    },
}
