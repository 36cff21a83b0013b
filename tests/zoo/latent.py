"""Families of latent attention (MLA), alone or beside other layers."""

from __future__ import annotations

from typing import Any

from tests.zoo.common import LATENT, wrapped

_INDEXED = {**LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
_DELTA = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "num_experts_per_token": 2,
}
_LONGCAT = {
    **LATENT,
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **LATENT,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "first_k_dense_replace": 1,
    },
    "bailing_moe_v3": {
        **LATENT,
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2": {**LATENT, "topk_method": "greedy", "rope_scaling": {"type": "yarn", **_YARN}},
    "deepseek_v3": LATENT,
    "deepseek_v32": _INDEXED,
    "deepseek_v41": {
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": [1] * 4,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
    },
    "glm4_moe_lite": {**LATENT},
    "glm_moe_dsa": {
        **_INDEXED,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "kimi_k25": wrapped("deepseek_v3", **LATENT),
    "kimi_k3": wrapped("kimi_linear", **LATENT, hidden_act="situ", **_DELTA),
    "kimi_linear": {**LATENT, **_DELTA, "model_max_length": 4096},
    "kimi_vl": wrapped("kimi_vl", **LATENT),
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "minicpm3": {
        **LATENT,
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "scale_emb": 12,
        "rope_scaling": {"original_max_position_embeddings": 2048},
    },
    "mistral4": {
        **LATENT,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            **_YARN,
        },
    },
    "youtu_llm": {**LATENT},
}
