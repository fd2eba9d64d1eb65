"""Tiny models of transformers, one table for all families. An entry has only the differences from common
sizes."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.layouts import SEQ, VOCAB

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * SEQ,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
GPT2_NAMES = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer"}
GPT2_NAMES |= {"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}
# Settings that a family names differently, or does not have.
RENAMED = {
    "gpt2": {**GPT2_NAMES, "num_key_value_heads": None},
    "bloom": {
        **{"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": None},
        **{"num_key_value_heads": None, "max_position_embeddings": None},
    },
    "gpt_neox": {"num_key_value_heads": None},
    "falcon": {"num_key_value_heads": None, "intermediate_size": "ffn_hidden_size"},
    # In Mixtral and OLMoE this setting is the size of an expert.
    **dict.fromkeys(("mixtral", "olmoe", "flex_olmo", "gpt_oss", "minimax_m2"), {"intermediate_size": None}),
}
NEOX_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
# Name -> (model type, settings that differ from SIZES).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),
    "bloom, fp16": ("bloom", {"dtype": torch.float16}),
    "gpt2": ("gpt2", {"n_inner": None}),
    "gpt2, bf16, wider MLP": ("gpt2", {"dtype": torch.bfloat16}),
    "llama-2": ("llama", {"num_key_value_heads": 4}),
    "llama-3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama-3.2, tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama, linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama, multi-query": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen-3": ("qwen3", {"head_dim": 16}),
    "olmo-2": ("olmo2", {}),
    "pythia": ("gpt_neox", NEOX_ROPE),
    "falcon": ("falcon", {}),
    "mistral v0.1, window": ("mistral", {"sliding_window": 5}),
    "qwen-2, window": ("qwen2", WINDOW),
    "qwen-3, tied, window": ("qwen3", {"tie_word_embeddings": True, "head_dim": 8, **WINDOW}),
    "olmo-2, tied, one key head": ("olmo2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gpt-neox, sequential, tied": (
        "gpt_neox",
        {"use_parallel_residual": False, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    ),
    "falcon, all heads, untied": ("falcon", {"multi_query": False, "tie_word_embeddings": False}),
    "qwen-2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen-2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen-2.5, yarn": ("qwen2", {"rope_parameters": YARN}),
}
OLMO3_ROPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
MODELS |= {
    "olmo-3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 5, "rope_parameters": OLMO3_ROPE}),
    "gemma-3": (
        "gemma3_text",
        {
            **{"num_hidden_layers": 7, "sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 24},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo-3, all windows": (
        "olmo3",
        {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2, "num_key_value_heads": 4},
    ),
}
SPARSE = {"num_hidden_layers": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 16}
WITHOUT_HEADS = {name: value for name, value in SPARSE.items() if name != "head_dim"}
GLM = {**SPARSE, "n_routed_experts": 8, "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5}
MODELS |= {
    "mixtral": ("mixtral", {"intermediate_size": 24, "num_local_experts": 4}),
    "mixtral, window, bf16": (
        "mixtral",
        {"intermediate_size": 24, "num_local_experts": 4, "sliding_window": 5, "dtype": torch.bfloat16},
    ),
    "olmoe": ("olmoe", {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe, renormalized, tied": (
        "olmoe",
        {
            **{"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
            **{"norm_topk_prob": True, "tie_word_embeddings": True},
        },
    ),
    "qwen-3-moe": ("qwen3_moe", {**SPARSE, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen-3-moe, every second layer, window": (
        "qwen3_moe",
        {**SPARSE, "num_experts": 4, "decoder_sparse_step": 2, **WINDOW},
    ),
    "glm-4.5": ("glm4_moe", {**GLM, "attention_bias": True, "use_qk_norm": True}),
    "glm-4.5, groups, bf16": (
        "glm4_moe",
        {
            **{**GLM, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 2},
            **{"first_k_dense_replace": 0, "dtype": torch.bfloat16},
        },
    ),
}

_EARLIER = {kind for kind, _ in MODELS.values()}
# Families of 2025 and 2026, and families that need only a table.
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"num_hidden_layers": 3, "sliding_window": 5, "layer_types": SLIDING}
OSS_YARN = {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
OSS = {**WINDOWS, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
ONE_SHARED = {"num_experts": 8, "num_shared_experts": 2}
GLM_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
MODELS |= {
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma-2": (
        "gemma2",
        {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0},
    ),
    "gemma-2, no caps, yarn": (
        "gemma2",
        {
            **{**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8, "rope_parameters": YARN},
            **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
        },
    ),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere-2": ("cohere2", {**WINDOWS, "logit_scale": 2.0}),
    "cohere-2, all windows, bf16": (
        "cohere2",
        {**WINDOWS, "layer_types": SLIDING[:1] * 3, "logit_scale": 2.0, "dtype": torch.bfloat16},
    ),
    "smollm-3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm-3, untied, yarn": (
        "smollm3",
        {"tie_word_embeddings": False, "no_rope_layers": [0, 1], "rope_parameters": YARN},
    ),
    "seed-oss": ("seed_oss", {"head_dim": 16}),
    "ernie-4.5": ("ernie4_5", {"head_dim": 16}),
    "helium": ("helium", {"head_dim": 8, "num_key_value_heads": 1}),
    "ministral": ("ministral", {**WINDOWS, "head_dim": 8}),
    "cwm": ("cwm", {**WINDOWS, "head_dim": 16, "rope_parameters": LLAMA3}),
    "internlm-3": ("internlm3", {"head_dim": 16}),
    "iquest-coder": ("iquestcoder", {"head_dim": 16}),
    "exaone-4": ("exaone4", WINDOWS),
    "exaone-4, no windows": ("exaone4", {"sliding_window": None, "layer_types": SLIDING[1:2] * 2}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "starcoder-2": ("starcoder2", {"sliding_window": 5}),
    "phi-3": ("phi3", {"sliding_window": 5}),
    "phi-4-mini": ("phi3", {**GLM_ROPE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "glm-4": ("glm", {**GLM_ROPE, "head_dim": 16}),
    "glm-4-0414": ("glm4", {**GLM_ROPE, "head_dim": 16, "attention_bias": False}),
    "gpt-oss": ("gpt_oss", {**OSS, "rope_parameters": OSS_YARN}),
    "gpt-oss, no windows, bf16": (
        "gpt_oss",
        {
            **{**OSS, "layer_types": SLIDING[1:2] * 3, "swiglu_limit": 0.5, "dtype": torch.bfloat16},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "qwen-2-moe": (
        "qwen2_moe",
        {
            **WITHOUT_HEADS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "flex-olmo": ("flex_olmo", {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "mellum": (
        "mellum",
        {
            **{**WINDOWS, **SPARSE, **DENSE_FIRST, "num_experts": 6},
            "rope_parameters": {
                **OLMO3_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
            },
        },
    ),
    "dots.llm1": (
        "dots1",
        {
            **{**WINDOWS, **SPARSE, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
        },
    ),
    "solar-open": ("solar_open", {**SPARSE, "n_routed_experts": 8, "routed_scaling_factor": 2.5}),
    "hunyuan-3": ("hy_v3", {**SPARSE, **ONE_SHARED, **DENSE_FIRST}),
    "k-exaone": ("exaone_moe", {**WINDOWS, **SPARSE, **ONE_SHARED, **DENSE_FIRST, "head_dim": 8}),
    "trinity": (
        "afmoe",
        {
            **{**WINDOWS, **SPARSE, "num_experts": 6, "num_shared_experts": 1, "route_scale": 2.5},
            **{"mup_enabled": True, "num_dense_layers": 1},
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            **{**GLM_ROPE, "num_hidden_layers": 3, "head_dim": 16, "intermediate_size": 24},
            **{"num_local_experts": 6, "num_experts_per_tok": 3},
        },
    ),
    "flint": (
        "flint",
        {
            **WINDOWS,
            **SPARSE,
            "num_experts": 6,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
}
PARTS = {
    "full_attention": {**YARN, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7e3, "partial_rotary_factor": 0.25},
}
MIMO = {
    **{**WINDOWS, **SPARSE, **DENSE_FIRST, "n_routed_experts": 8, "num_key_value_heads": 1, "head_dim": 24},
    **{"v_head_dim": 10, "n_group": 2, "topk_group": 1, "attention_value_scale": 0.7},
}
LAGUNA = {
    **{**WINDOWS, **SPARSE, **DENSE_FIRST, "num_experts": 6, "shared_expert_intermediate_size": 40},
    **{"num_attention_heads_per_layer": [6, 4, 6], "rope_parameters": PARTS},
}
MODELS |= {
    "mimo-v2-flash": ("mimo_v2_flash", {**MIMO, "rope_parameters": PARTS, "attention_bias": True}),
    "mimo-v2-flash, all windows, bf16": (
        "mimo_v2_flash",
        {**MIMO, "layer_types": SLIDING[:1] * 3, "v_head_dim": 24, "dtype": torch.bfloat16},
    ),
    "mimo-v2-flash, no windows": ("mimo_v2_flash", {**MIMO, "layer_types": SLIDING[1:2] * 3}),
    "laguna": ("laguna", {**LAGUNA, "moe_routed_scaling_factor": 2.5}),
    "laguna, gates of elements, equal heads": (
        "laguna",
        {**LAGUNA, "gating": "per-element", "num_attention_heads_per_layer": None, "head_dim": 8},
    ),
}
LATENT = {
    **{"num_hidden_layers": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_routed_experts": 8},
    **{"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6},
    **{"qk_rope_head_dim": 4, "v_head_dim": 10, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "first_k_dense_replace": 1,
}
DEEPSEEK_YARN = YARN | {"beta_fast": 2.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.3}
MODELS |= {
    "deepseek-v3": ("deepseek_v3", {**LATENT, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v3, plain queries, bf16": (
        "deepseek_v3",
        {
            **{**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
            **{"v_head_dim": 5, "dtype": torch.bfloat16},
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {**LATENT, "topk_method": "group_limited_greedy", "rope_parameters": YARN | {"mscale": 1.0}},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            **{**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
            "rope_parameters": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        {**LATENT, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}
SAME_FUNCTION = {
    **{"cwm": "ministral", "helium": "ernie4_5", "internlm3": "llama", "iquestcoder": "llama"},
    **{"solar_open": "glm4_moe", "hy_v3": "glm4_moe", "glm4_moe_lite": "deepseek_v3"},
}
"""Type of a model -> an earlier type whose table can express the model, and which an export therefore
writes."""
LATER = {kind for kind, _ in MODELS.values()} - _EARLIER | {"kimi_k2"}
OTHER_NAMES = ("hunyuan-3", "phi-3")
"""Models that an export writes as a different type, with different names of weights."""
