"""Latent attention: DeepSeek-V2 and V3, Kimi K2, GLM 4.7 Flash. Experts and routers are as in GLM 4.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.families.experts import (
    EXPERT_BIAS,
    EXPERT_SIZE,
    FIRST_DENSE,
    GROUP_FIELDS,
    GROUPS,
    HAS_EXPERTS,
    MLP_LAYER_TYPES,
    MLP_PARAMETERS,
    NEXT_TOKEN_HEAD,
    NEXT_TOKENS,
    NO_GROUPS,
    NOT_CONVERTED,
    OUTSIDE_MLP,
    SHARED_EXPERTS,
    SIGMOID,
    SIGMOID_WEIGHTS,
    TOP_K,
    groups_conversion,
    groups_of_experts,
    with_next_tokens,
)
from megatron.checkpoint.huggingface.families.llama import ATTENTION, CONSTANTS, FIELDS, LLAMA, UNTIED
from megatron.checkpoint.huggingface.family import Conversion, Parameter
from megatron.checkpoint.huggingface.rope import LATENT_ROPE
from megatron.config import ModelConfig
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Megatron's name of a module -> Hugging Face's name: with compressed queries, and without.
_COMPRESSED = {"q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "q_up_proj": "q_b_proj"}
_MODULES = {
    "kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "kv_up_proj": "kv_b_proj",
    "dense": "o_proj",
}


def _parameter(own: str, theirs: str, **settings: Any) -> Parameter:
    return Parameter(f"{{layer}}.self_attention.{own}.weight", (f"{ATTENTION}.{theirs}.weight",), **settings)


_PARAMETERS = (
    *(parameter for parameter in OUTSIDE_MLP if "self_attention" not in parameter.megatron),
    _parameter("q_proj", "q_proj", exists=lambda model, _: model.q_lora_rank is None),
    *(
        _parameter(*names, exists=lambda model, _: model.q_lora_rank is not None)
        for names in _COMPRESSED.items()
    ),
    *(_parameter(*names) for names in _MODULES.items()),
    *MLP_PARAMETERS,
)
_FIELDS = (
    *(*FIELDS, TOP_K, EXPERT_SIZE, ("num_experts", "n_routed_experts"), *GROUP_FIELDS),
    *(("q_lora_rank", "q_lora_rank"), ("kv_lora_rank", "kv_lora_rank"), ("v_head_dim", "v_head_dim")),
    *(("qk_head_dim", "qk_nope_head_dim"), ("qk_pos_emb_head_dim", "qk_rope_head_dim")),
)
_CONSTANTS = {**CONSTANTS, "multi_latent_attention": True, "qk_layernorm": True}
_HF_CONSTANTS = {"hidden_act": "silu", "attention_bias": False}


def _check_key_heads(hf_config: PreTrainedConfig) -> dict[str, Any]:
    heads, keys = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if keys not in (None, heads):
        raise UserError(
            f"the model has num_key_value_heads = {one_line(keys)} and num_attention_heads = "
            f"{one_line(heads)}: expected equal numbers, since each head of latent attention has its own keys"
        )
    return {}


_KEY_HEADS = Conversion(
    hf=("num_key_value_heads",),
    to_hf=lambda model: {"num_key_value_heads": model.num_attention_heads},
    to_megatron=_check_key_heads,
)


_EPSILON = 1e-6
"""Epsilon of the norms of compressed vectors. transformers always uses it, whatever rms_norm_eps is."""
_NORMS = Conversion(
    megatron=("latent_layernorm_epsilon",),
    to_megatron=lambda hf_config: (
        {} if hf_config.rms_norm_eps == _EPSILON else {"latent_layernorm_epsilon": _EPSILON}
    ),
    needed=lambda model: (
        {}
        if (model.latent_layernorm_epsilon or model.layernorm_epsilon) == _EPSILON
        else {"latent_layernorm_epsilon": _EPSILON}
    ),
)
# Settings that only the code of published models reads. They describe the training, or its layout.
_IGNORED = (
    *("head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size", "auto_map", "pretraining_tp"),
    *NOT_CONVERTED,
)

DEEPSEEK_V3 = replace(
    LLAMA,
    title="DeepSeek-V3",
    architecture="DeepseekV3ForCausalLM",
    fields=_FIELDS,
    megatron_constants={**_CONSTANTS, **SIGMOID},
    # transformers reads only the first three of these settings.
    hf_constants={
        **_HF_CONSTANTS,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    conversions=(
        *(_KEY_HEADS, UNTIED, LATENT_ROPE, _NORMS, HAS_EXPERTS, FIRST_DENSE),
        *(SHARED_EXPERTS, GROUPS, SIGMOID_WEIGHTS, NEXT_TOKENS),
    ),
    parameters=with_next_tokens((*_PARAMETERS, EXPERT_BIAS)),
    head=NEXT_TOKEN_HEAD,
    ignored=_IGNORED,
)

KIMI_K2 = replace(DEEPSEEK_V3, title="Kimi K2", config_type="deepseek_v3")

# --- GLM 4.7 Flash: a list of the kinds of layers ---


def _layers_to_hf(model: ModelConfig) -> dict[str, Any]:
    settings = MLP_LAYER_TYPES.to_hf(model)
    kinds = settings["mlp_layer_types"]
    if kinds == sorted(kinds):  # other readers require dense layers before all others
        settings["first_k_dense_replace"] = kinds.count("dense")
    return settings


def _check_first_dense(settings: Mapping[str, Any], hf_config: PreTrainedConfig) -> None:
    number, kinds = settings.get("first_k_dense_replace"), hf_config.mlp_layer_types
    if type(number) is int and kinds != ["dense"] * number + ["sparse"] * (len(kinds) - number):
        raise UserError(
            f"the model has first_k_dense_replace = {number}, but transformers uses mlp_layer_types = "
            f"{one_line(kinds)}: correct one of the two"
        )


_LAYER_TYPES = replace(
    MLP_LAYER_TYPES,
    hf=("mlp_layer_types", "first_k_dense_replace"),
    to_hf=_layers_to_hf,
    check_file=_check_first_dense,
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    title="GLM 4.7 Flash",
    architecture="Glm4MoeLiteForCausalLM",
    hf_constants={**_HF_CONSTANTS, "rope_interleave": True, "topk_method": "noaux_tc"},
    conversions=tuple(_LAYER_TYPES if pair is FIRST_DENSE else pair for pair in DEEPSEEK_V3.conversions),
)

# --- DeepSeek-V2: softmax scores that are not renormalized; the score of a group is its best expert's ---


def _v2_groups_to_hf(model: ModelConfig) -> dict[str, Any]:
    method = "greedy" if model.moe_router_num_groups is None else "group_limited_greedy"
    return {"topk_method": method, **GROUPS.to_hf(model)}


def _v2_groups_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    method = hf_config.topk_method
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"the model has topk_method = {one_line(method)}: expected greedy or group_limited_greedy"
        )
    return groups_of_experts(hf_config, 1) if method == "group_limited_greedy" else NO_GROUPS


_V2_GROUPS = replace(
    groups_conversion(1),
    hf=("n_group", "topk_group", "topk_method"),
    to_hf=_v2_groups_to_hf,
    to_megatron=_v2_groups_to_megatron,
)
_FACTOR = Conversion(
    megatron=("moe_router_topk_scaling_factor",),
    hf=("routed_scaling_factor",),
    to_hf=lambda model: {"routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0},
    to_megatron=lambda hf_config: (
        {}
        if hf_config.routed_scaling_factor == 1.0
        else {"moe_router_topk_scaling_factor": hf_config.routed_scaling_factor}
    ),
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    title="DeepSeek-V2",
    architecture="DeepseekV2ForCausalLM",
    megatron_constants={**_CONSTANTS, "moe_router_pre_softmax": True},
    hf_constants={
        **_HF_CONSTANTS,
        "mlp_bias": False,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
    },
    conversions=(
        *(_KEY_HEADS, UNTIED, LATENT_ROPE, _NORMS, HAS_EXPERTS, FIRST_DENSE),
        *(SHARED_EXPERTS, _V2_GROUPS, _FACTOR),
    ),
    parameters=_PARAMETERS,
    head=LLAMA.head,
)
