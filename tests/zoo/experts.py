"""Families of full attention with mixtures of experts."""

from __future__ import annotations

from typing import Any

from tests.zoo.common import MULTIPLIERS, wrapped

EXPERTS: dict[str, dict[str, Any]] = {
    "bailing_moe": {"first_k_dense_replace": 1},
    "dbrx": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {},
    "dots1": {"first_k_dense_replace": 1, "scoring_func": "noaux_tc"},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "glm4_moe": {"first_k_dense_replace": 1, "rope_scaling": None, "use_qk_norm": True},
    "granitemoe": MULTIPLIERS,
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
    "Klear": {},
    "minimax": {"shared_intermediate_size": 0, "rotary_dim": 8},
    "minimax_m3_vl": wrapped(
        "minimax_m3_text",
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        sparse_attention_freq=[0, 1] * 2,
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=8,
        index_topk_blocks=3,
    ),
    "mixtral": {},
    "olmoe": {},
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.5] * 8,
            "short_mscale": 1.1,
            "long_mscale": 1.2,
        }
    },
    "phixtral": {
        "num_vocab": 64,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 3,
        "rotary_dim": 8,
    },
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_vl_moe": wrapped("qwen3_vl_moe_text"),
    "solar_open": {"first_k_dense_replace": 1},
}
