"""Relatives of GLM 4.5 with sigmoid scores: dots.llm1, Hunyuan 3, K-EXAONE, Trinity, MiniMax M2, Flint."""

from __future__ import annotations

from dataclasses import replace

from megatron.checkpoint.huggingface.families.experts import (
    DENSE_MLP,
    EXPERT_PARAMETERS,
    FIELDS_WITH_DENSE,
    FIRST_DENSE,
    GLM4_MOE,
    GROUP_FIELDS,
    GROUPS,
    HAS_EXPERTS,
    MIXTRAL_EXPERTS,
    MLP_LAYER_TYPES,
    NOT_CONVERTED,
    ONLY_EXPERT_FIELDS,
    ONLY_EXPERTS,
    OUTSIDE_MLP,
    QWEN_LAYERS,
    SHARED_EXPERTS,
    SIGMOID,
    SIGMOID_WEIGHTS,
    always_normalized,
    choice_bias,
    expert_parameters,
    first_dense,
    shared_expert,
    shared_experts,
)
from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    CONVERSIONS,
    LLAMA,
    QK_NORM_PARAMETERS,
    QUERY_GROUPS,
    UNTIED,
    in_layer,
    with_gate,
)
from megatron.checkpoint.huggingface.rope import PARTIAL_ROPE, WINDOWS, rotary_in_windows

_WITH_NORMS = {**CONSTANTS, **SIGMOID, "qk_layernorm": True}
_PARAMETERS = (*OUTSIDE_MLP, *QK_NORM_PARAMETERS, *DENSE_MLP)

DOTS1 = replace(
    GLM4_MOE,
    title="dots.llm1",
    architecture="Dots1ForCausalLM",
    fields=(*FIELDS_WITH_DENSE, ("num_experts", "n_routed_experts"), *GROUP_FIELDS),
    megatron_constants=_WITH_NORMS,
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    conversions=(
        *(QUERY_GROUPS, UNTIED, WINDOWS),
        *(HAS_EXPERTS, FIRST_DENSE, SHARED_EXPERTS, GROUPS, SIGMOID_WEIGHTS),
    ),
    ignored=("max_window_layers", *NOT_CONVERTED),
)

HUNYUAN3 = replace(
    LLAMA,
    title="Hunyuan 3",
    architecture="HYV3ForCausalLM",
    fields=(*FIELDS_WITH_DENSE, ("num_experts", "num_experts")),
    megatron_constants=_WITH_NORMS,
    conversions=(
        *(*CONVERSIONS, HAS_EXPERTS, MLP_LAYER_TYPES),
        *(shared_experts("num_shared_experts"), always_normalized("router_scaling_factor")),
    ),
    parameters=(
        *_PARAMETERS,
        *expert_parameters("mlp", "gate_proj", "up_proj", "down_proj", router="router.gate"),
        *(*shared_expert("shared_mlp"), choice_bias("mlp.expert_bias")),
    ),
    # enable_moe_fp32_combine only changes how the sum of routed and shared experts is rounded.
    ignored=("enable_moe_fp32_combine", *NOT_CONVERTED),
)

K_EXAONE = replace(
    DOTS1,
    title="K-EXAONE",
    architecture="ExaoneMoeForCausalLM",
    fields=(*FIELDS_WITH_DENSE, ("num_experts", "num_experts"), *GROUP_FIELDS),
    hf_constants={"hidden_act": "silu"},
    conversions=(
        *(QUERY_GROUPS, UNTIED, rotary_in_windows(without_windows=True)),
        *(HAS_EXPERTS, MLP_LAYER_TYPES, shared_experts("num_shared_experts"), GROUPS, SIGMOID_WEIGHTS),
    ),
    parameters=(
        *(*_PARAMETERS, *EXPERT_PARAMETERS, *shared_expert("shared_experts")),
        choice_bias("mlp.e_score_correction_bias"),
    ),
    # transformers derives mlp_layer_types from this setting if a file has no mlp_layer_types.
    ignored=("first_k_dense_replace", *NOT_CONVERTED),
)

# --- Trinity: a gate on the attention's output, four norms per layer, scaled embeddings ---

TRINITY = replace(
    LLAMA,
    title="AFMoE",
    architecture="AfmoeForCausalLM",
    fields=(*FIELDS_WITH_DENSE, ("num_experts", "num_experts"), ("scale_embeddings", "mup_enabled")),
    megatron_constants={
        **_WITH_NORMS,
        "attention_output_gate": True,
        "layer_arrangement": "pre-post-norm",
    },
    hf_constants={
        "hidden_act": "silu",
        "attention_bias": False,
        "score_func": "sigmoid",
        "route_norm": True,
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
    },
    conversions=(
        *(QUERY_GROUPS, UNTIED, rotary_in_windows(without_windows=False)),
        *(HAS_EXPERTS, first_dense("num_dense_layers")),
        *(shared_experts("num_shared_experts"), always_normalized("route_scale")),
    ),
    parameters=(
        *with_gate(_PARAMETERS, "gate"),
        *(
            in_layer(f"{name}_layernorm.weight", f"{name}_layernorm.weight")
            for name in ("pre_mlp", "post_mlp")
        ),
        *expert_parameters("mlp", "gate_proj", "up_proj", "down_proj", router="router.gate"),
        *(*shared_expert("shared_experts"), choice_bias("mlp.expert_bias")),
    ),
    # Settings of the training, and settings from which transformers derives layer_types if a file has none.
    ignored=(
        "load_balance_coeff",
        "use_grouped_mm",
        "global_attn_every_n_layers",
        "auto_map",
        *NOT_CONVERTED,
    ),
)

MINIMAX_M2 = replace(
    LLAMA,
    title="MiniMax M2",
    architecture="MiniMaxM2ForCausalLM",
    fields=(*ONLY_EXPERT_FIELDS, ("kv_channels", "head_dim"), ("num_experts", "num_local_experts")),
    megatron_constants={**_WITH_NORMS, "qk_layernorm_scope": "projection"},
    hf_constants={
        "hidden_act": "silu",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    conversions=(QUERY_GROUPS, UNTIED, PARTIAL_ROPE, HAS_EXPERTS, ONLY_EXPERTS, always_normalized()),
    parameters=(
        *(*OUTSIDE_MLP, *QK_NORM_PARAMETERS, *MIXTRAL_EXPERTS),
        choice_bias("block_sparse_moe.e_score_correction_bias"),
    ),
    # Noise of the router's input, layers for multi-token prediction, and settings that repeat others.
    ignored=(
        *("router_jitter_noise", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        *("attn_type_list", "rotary_dim", "auto_map", *NOT_CONVERTED),
    ),
)

# --- Flint: sinks, rotary embeddings only in windows, scores without a bias ---

FLINT = replace(
    LLAMA,
    title="Flint",
    architecture="FlintForCausalLM",
    fields=(
        *(*FIELDS_WITH_DENSE, ("num_experts", "num_experts")),
        ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    ),
    megatron_constants={
        **CONSTANTS,
        "qk_layernorm": True,
        "moe_router_score_function": "sigmoid",
        "softmax_type": "learnable",
    },
    hf_constants={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True},
    conversions=(
        *(QUERY_GROUPS, UNTIED, rotary_in_windows(without_windows=False)),
        *(HAS_EXPERTS, QWEN_LAYERS, always_normalized()),
    ),
    parameters=(
        *(*_PARAMETERS, *EXPERT_PARAMETERS, *shared_expert("shared_expert")),
        in_layer("self_attention.core_attention.softmax_offset", "self_attn.softmax_offset"),
    ),
    ignored=NOT_CONVERTED,
)
