"""Families whose layers with a window have different heads: MiMo-V2-Flash and Laguna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.families.experts import (
    DENSE_MLP,
    EXPERT_BIAS,
    EXPERT_PARAMETERS,
    FIELDS_WITH_DENSE,
    GROUPS,
    HAS_EXPERTS,
    MLP_LAYER_TYPES,
    NOT_CONVERTED,
    OUTSIDE_MLP,
    SIGMOID,
    SIGMOID_WEIGHTS,
    always_normalized,
    choice_bias,
    shared_expert,
)
from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    LLAMA,
    QK_NORM_PARAMETERS,
    QKV_BIAS,
    UNTIED,
    groups_of,
    in_layer,
    with_gate,
)
from megatron.checkpoint.huggingface.family import Conversion, checked_count
from megatron.checkpoint.huggingface.rope import KINDS, partial_layered_rope
from megatron.config import ModelConfig
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FULL, _SLIDING = KINDS

# --- MiMo-V2-Flash: twice the key heads and learned sinks in windows, small value heads ---


def _groups_to_hf(model: ModelConfig) -> dict[str, Any]:
    groups = model.of_kind(has_window=model.window_size is not None).query_groups
    return {"num_key_value_heads": groups if model.window_size is None else groups // 2}


def _groups_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    heads, kinds = hf_config.num_attention_heads, set(hf_config.layer_types)
    groups = checked_count("num_key_value_heads", hf_config.num_key_value_heads)
    if _SLIDING not in kinds:
        return groups_of(heads, groups)
    if type(heads) is int and heads % (2 * groups):
        raise UserError(
            f"the model has num_key_value_heads = {groups} and num_attention_heads = {heads}: expected a "
            f"multiple of {2 * groups} heads, since layers with a window have twice the key heads"
        )
    if _FULL not in kinds:
        return {**groups_of(heads, 2 * groups), "softmax_type": "learnable"}
    own = {"window_num_query_groups": 2 * groups, "window_softmax_type": "learnable"}
    return {"group_query_attention": True, "num_query_groups": groups, **own}


def _needed_groups(model: ModelConfig) -> dict[str, Any]:
    if model.window_size is None:
        return {"softmax_type": "vanilla"}
    if model.window_pattern is None:
        odd = {"num_query_groups": 2 * model.query_groups} if model.query_groups % 2 else {}
        return {"softmax_type": "learnable", **odd}
    return {
        "softmax_type": "vanilla",
        "window_softmax_type": "learnable",
        "group_query_attention": True,
        "window_num_query_groups": 2 * model.query_groups,
    }


def _check_older_settings(settings: Mapping[str, Any], hf_config: PreTrainedConfig) -> None:
    """Raises UserError if a setting of the published file that transformers does not read differs from what
    transformers uses."""
    used = {
        "hybrid_layer_pattern": [int(kind == _SLIDING) for kind in hf_config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in hf_config.mlp_layer_types],
        "swa_num_attention_heads": hf_config.num_attention_heads,
        "swa_num_key_value_heads": 2 * hf_config.num_key_value_heads,
        "swa_head_dim": hf_config.head_dim,
        "swa_v_head_dim": hf_config.v_head_dim,
        "swa_rope_theta": hf_config.rope_parameters[_SLIDING].get("rope_theta"),
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "n_shared_experts": None,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    for name, value in used.items():
        if (found := settings.get(name)) is not None and found != value:
            raise UserError(
                f"the model has {name} = {one_line(found)}, but transformers uses {one_line(value)}: correct "
                "it, or the setting of transformers"
            )


_GROUPS_OF_WINDOWS = Conversion(
    megatron=(
        *("group_query_attention", "num_query_groups", "window_num_query_groups"),
        *("softmax_type", "window_softmax_type"),
    ),
    hf=(
        *("num_key_value_heads", "hybrid_layer_pattern", "moe_layer_freq", "sliding_window_size"),
        *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
        *("swa_rope_theta", "layernorm_epsilon", "n_shared_experts", "scoring_func", "topk_method"),
        *("add_swa_attention_sink_bias", "add_full_attention_sink_bias"),
    ),
    to_hf=_groups_to_hf,
    to_megatron=_groups_to_megatron,
    needed=_needed_groups,
    check_file=_check_older_settings,
)
_VALUE_HEADS = Conversion(
    megatron=("v_channels",),
    hf=("v_head_dim",),
    to_hf=lambda model: {"v_head_dim": model.value_channels},
    to_megatron=lambda hf_config: (
        {} if hf_config.v_head_dim == hf_config.head_dim else {"v_channels": hf_config.v_head_dim}
    ),
)

MIMO_V2_FLASH = replace(
    LLAMA,
    title="MiMo-V2-Flash",
    architecture="MiMoV2FlashForCausalLM",
    fields=(
        *(*FIELDS_WITH_DENSE, ("num_experts", "n_routed_experts"), ("add_qkv_bias", "attention_bias")),
        ("attention_value_scale", "attention_value_scale"),
    ),
    megatron_constants={**CONSTANTS, **SIGMOID},
    hf_constants={"hidden_act": "silu"},
    conversions=(
        *(_GROUPS_OF_WINDOWS, _VALUE_HEADS, UNTIED, partial_layered_rope(0.334)),
        *(HAS_EXPERTS, MLP_LAYER_TYPES, GROUPS, SIGMOID_WEIGHTS),
    ),
    parameters=(
        *(*OUTSIDE_MLP, QKV_BIAS, *DENSE_MLP, *EXPERT_PARAMETERS, EXPERT_BIAS),
        in_layer(
            "self_attention.core_attention.softmax_offset",
            "self_attn.attention_sink_bias",
            exists=lambda model, block: model.of_layer(block).softmax_type == "learnable",
        ),
    ),
    # Settings of attention in blocks or chunks, which the model does not have.
    ignored=("hybrid_block_size", "attention_chunk_size", "auto_map", *NOT_CONVERTED),
)

# --- Laguna: different numbers of query heads in layers with a window, gates with a softplus ---


def _heads_to_hf(model: ModelConfig) -> dict[str, Any]:
    heads = [model.of_layer(layer).num_attention_heads for layer in range(model.num_layers)]
    return {"num_key_value_heads": model.query_groups, "num_attention_heads_per_layer": heads}


def _heads_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    heads, groups = hf_config.num_attention_heads_per_layer, hf_config.num_key_value_heads
    by_kind = {
        kind: {count for count, own in zip(heads, hf_config.layer_types, strict=True) if own == kind}
        for kind in KINDS
    }
    if any(len(counts) > 1 for counts in by_kind.values()):
        raise UserError(
            f"the model has num_attention_heads_per_layer = {one_line(heads)}: expected one number for all "
            f"{_FULL} layers and one for all {_SLIDING} layers"
        )
    full, sliding = by_kind[_FULL] or by_kind[_SLIDING], by_kind[_SLIDING] or by_kind[_FULL]
    (own,), (of_windows,) = full, sliding
    fields = {"num_attention_heads": own, **groups_of(own, groups)}
    if own != of_windows:
        groups_of(of_windows, groups)
        fields |= {"window_num_attention_heads": of_windows, "group_query_attention": True}
        fields["num_query_groups"] = groups
    return fields


_HEADS_OF_WINDOWS = Conversion(
    megatron=("group_query_attention", "num_query_groups", "window_num_attention_heads"),
    hf=("num_key_value_heads", "num_attention_heads_per_layer"),
    to_hf=_heads_to_hf,
    to_megatron=_heads_to_megatron,
    needed=lambda model: {} if model.window_num_attention_heads is None else {"group_query_attention": True},
)
_SCOPES = {"per-head": "head", "per-element": "element"}


def _gates_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    found = "per-head" if hf_config.gating is True else hf_config.gating
    if found not in _SCOPES:
        raise UserError(f"the model has gating = {one_line(found)}: expected true or {' or '.join(_SCOPES)}")
    return {"attention_output_gate_scope": _SCOPES[found]}


_GATES = Conversion(
    megatron=("attention_output_gate_scope",),
    hf=("gating",),
    to_hf=lambda model: {"gating": f"per-{model.attention_output_gate_scope}"},
    to_megatron=_gates_to_megatron,
)

LAGUNA = replace(
    LLAMA,
    title="Laguna",
    architecture="LagunaForCausalLM",
    fields=(
        *(*FIELDS_WITH_DENSE, ("num_experts", "num_experts")),
        ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    ),
    megatron_constants={
        **CONSTANTS,
        **SIGMOID,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "attention_output_gate_activation": "softplus",
    },
    hf_constants={
        "hidden_act": "silu",
        "attention_bias": False,
        "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0,
    },
    conversions=(
        *(_HEADS_OF_WINDOWS, _GATES, UNTIED, partial_layered_rope(1.0)),
        *(HAS_EXPERTS, MLP_LAYER_TYPES, always_normalized("moe_routed_scaling_factor")),
    ),
    parameters=(
        *with_gate(OUTSIDE_MLP, "g"),
        *(*QK_NORM_PARAMETERS, *DENSE_MLP, *EXPERT_PARAMETERS, *shared_expert("shared_expert")),
        choice_bias("mlp.experts.e_score_correction_bias"),
    ),
    ignored=NOT_CONVERTED,
)
