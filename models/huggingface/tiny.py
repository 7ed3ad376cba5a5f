"""Tiny configs of the first Hugging Face models, each with every layer kind of its family: for tests and examples.

Hidden size 64, 8 experts, vocabulary 512, 2 to 4 layers; values as a config.json holds them.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

# Multi-head latent attention as DeepSeek-V3 has it.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

# Sigmoid router with group-limited top-k, one shared expert, a dense first layer.
_GROUPED_EXPERTS: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

TINY: dict[str, dict[str, Any]] = {
    "mixtral": {
        **_COMMON,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek_v3": {
        **_COMMON,
        **_LATENT,
        **_GROUPED_EXPERTS,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        **_COMMON,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_next": {
        **_COMMON,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "kimi_linear": {
        **_COMMON,
        **_LATENT,
        **_GROUPED_EXPERTS,
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "glm_moe_dsa": {
        **_COMMON,
        **_LATENT,
        **_GROUPED_EXPERTS,
        "num_hidden_layers": 3,
        "index_topk": 8,
        # Enough heads that no two keys tie at a score of exactly 0, which top-k would break by position.
        "index_n_heads": 16,
        "index_head_dim": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
    },
}


def tiny_config(kind: str, **changes: Any) -> dict[str, Any]:
    """The tiny config of one model type, for `from_config`, with some fields changed."""
    return {"model_type": kind, **TINY[kind], **changes}
