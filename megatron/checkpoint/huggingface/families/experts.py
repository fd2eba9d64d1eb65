"""Mixtures of experts, described by their differences from Llama: Mixtral, OLMoE, Qwen 3, GLM 4.5.

The coefficient of the balance loss (router_aux_loss_coef) is not converted: transformers pools the counts of
all layers and does not divide them by the experts per token, so that no coefficient has an equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    CONVERSIONS,
    FIELDS,
    LLAMA,
    PARAMETERS,
    QK_NORM_PARAMETERS,
    QKV_BIAS,
    QUERY_GROUPS,
    UNTIED,
    WINDOW,
)
from megatron.checkpoint.huggingface.family import (
    NEXT_TOKEN_LAYERS,
    SIZES,
    Conversion,
    Parameter,
    Transform,
    checked_count,
    inverted,
)
from megatron.checkpoint.huggingface.rope import PARTIAL_ROPE
from megatron.config import ModelConfig
from megatron.config.sections.layer_pattern import DENSE, EXPERT_PATTERN, EXPERTS
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _join_gates(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """Returns [experts, 2 x rows, columns] of the experts' gates and values, which alternate in `parts`."""
    rows = [part for gate, value in zip(parts[::2], parts[1::2], strict=True) for part in (value, gate)]
    return torch.cat(rows).unflatten(0, (len(rows) // 2, -1))


# As in a dense MLP, Megatron stacks (value, gate).
EXPERT_GATES = Transform(
    lambda x, model: [part for expert in x for part in expert.chunk(2)[::-1]], _join_gates
)
STACKED = Transform(lambda x, model: list(x), lambda parts, model: torch.stack(list(parts)))


def _expert_parameters(module: str, gate: str, value: str, output: str) -> tuple[Parameter, ...]:
    """Returns the router and the experts of a layer. module: the MLP's name. gate, value, output: names of an
    expert's matrices."""
    layer = f"model.layers.{{block}}.{module}"
    first = tuple(f"{layer}.experts.{{expert}}.{matrix}.weight" for matrix in (gate, value))
    last = (f"{layer}.experts.{{expert}}.{output}.weight",)
    return (
        Parameter("{layer}.mlp.router.weight", (f"{layer}.gate.weight",), exists=ModelConfig.has_experts),
        Parameter("{layer}.mlp.experts.dense_h_to_4h.weight", first, EXPERT_GATES, ModelConfig.has_experts),
        Parameter("{layer}.mlp.experts.dense_4h_to_h.weight", last, STACKED, ModelConfig.has_experts),
    )


_MLP = "{layer}.mlp."
OUTSIDE_MLP = tuple(parameter for parameter in PARAMETERS if not parameter.megatron.startswith(_MLP))
DENSE_MLP = tuple(
    replace(parameter, exists=lambda model, block: not model.has_experts(block))
    for parameter in PARAMETERS
    if parameter.megatron.startswith(_MLP)
)
EXPERT_PARAMETERS = _expert_parameters("mlp", "gate_proj", "up_proj", "down_proj")

_TOP_K = ("moe_router_topk", "num_experts_per_tok")
# Of families whose layers all have experts. Families that also have dense layers: _FIELDS_WITH_DENSE.
_FIELDS = (
    *SIZES,
    ("moe_ffn_hidden_size", "intermediate_size"),
    ("layernorm_epsilon", "rms_norm_eps"),
    _TOP_K,
)
_EXPERT_SIZE = ("moe_ffn_hidden_size", "moe_intermediate_size")
_FIELDS_WITH_DENSE = (*FIELDS, _TOP_K, ("kv_channels", "head_dim"), _EXPERT_SIZE)
NOT_CONVERTED = ("router_aux_loss_coef", "output_router_logits")
# A dense model belongs to other families.
HAS_EXPERTS = Conversion(needed=lambda model: {"num_experts": model.num_experts or 8})
# Families without dense layers: the size of a dense MLP has no effect.
ONLY_EXPERTS = Conversion(
    megatron=("ffn_hidden_size",),
    to_megatron=lambda hf_config: {"ffn_hidden_size": hf_config.intermediate_size},
)
# Renormalized scores of all experts are the softmax over the chosen experts.
RENORMALIZED = inverted("moe_router_pre_softmax", "norm_topk_prob")

MIXTRAL = replace(
    LLAMA,
    title="Mixtral",
    architecture="MixtralForCausalLM",
    fields=(*_FIELDS, ("kv_channels", "head_dim"), ("num_experts", "num_local_experts"), WINDOW),
    hf_constants={"hidden_act": "silu"},
    conversions=(*CONVERSIONS, HAS_EXPERTS, ONLY_EXPERTS),
    parameters=(*OUTSIDE_MLP, *_expert_parameters("block_sparse_moe", "w1", "w3", "w2")),
    # Noise of the router's input, in training.
    ignored=("router_jitter_noise", *NOT_CONVERTED),
)

# --- OLMoE: one norm over all query heads, and one over all key heads ---

OLMOE = replace(
    LLAMA,
    title="OLMoE",
    architecture="OlmoeForCausalLM",
    fields=(*_FIELDS, ("num_experts", "num_experts")),
    megatron_constants={**CONSTANTS, "qk_layernorm": True, "qk_layernorm_scope": "projection"},
    hf_constants={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    conversions=(*CONVERSIONS, HAS_EXPERTS, ONLY_EXPERTS, RENORMALIZED),
    parameters=(*OUTSIDE_MLP, *QK_NORM_PARAMETERS, *EXPERT_PARAMETERS),
    ignored=NOT_CONVERTED,
)

# --- Qwen 3: dense layers anywhere ---


def _qwen_layers_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    num_layers, dense = hf_config.num_hidden_layers, hf_config.mlp_only_layers
    step = checked_count("decoder_sparse_step", hf_config.decoder_sparse_step)
    without = {*dense}
    letters = [DENSE if layer in without or (layer + 1) % step else EXPERTS for layer in range(num_layers)]
    if EXPERTS not in letters:
        raise UserError(
            f"the model has mlp_only_layers = {one_line(dense)} and decoder_sparse_step = {step}: no layer "
            "has experts"
        )
    return {"moe_layer_freq": EXPERT_PATTERN.parse(letters, num_layers)}


QWEN_LAYERS = Conversion(
    megatron=("moe_layer_freq",),
    hf=("decoder_sparse_step", "mlp_only_layers"),
    to_hf=lambda model: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not model.has_experts(layer)],
    },
    to_megatron=_qwen_layers_to_megatron,
)
# Without use_sliding_window, transformers sets sliding_window to None.
USES_WINDOW = Conversion(
    hf=("use_sliding_window",),
    to_hf=lambda model: {"use_sliding_window": model.window_size is not None},
)

QWEN3_MOE = replace(
    LLAMA,
    title="Qwen 3 with experts",
    architecture="Qwen3MoeForCausalLM",
    fields=(*_FIELDS_WITH_DENSE, ("num_experts", "num_experts"), WINDOW),
    megatron_constants={**CONSTANTS, "qk_layernorm": True},
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    conversions=(*CONVERSIONS, USES_WINDOW, HAS_EXPERTS, QWEN_LAYERS, RENORMALIZED),
    parameters=(*OUTSIDE_MLP, *QK_NORM_PARAMETERS, *DENSE_MLP, *EXPERT_PARAMETERS),
    # Published models have it, and transformers does not read it.
    ignored=("max_window_layers", *NOT_CONVERTED),
)

# --- GLM 4.5: sigmoid scores with a bias, a shared expert, and dense layers first ---


def _count(hf_config: PreTrainedConfig, name: str) -> int:
    return checked_count(name, getattr(hf_config, name))


def _first_dense(model: ModelConfig) -> int:
    """Returns the number of layers before the first that has experts."""
    return next((layer for layer in range(model.num_layers) if model.has_experts(layer)), model.num_layers)


def _dense_first(num_layers: int, num_dense: int) -> tuple[str, ...]:
    num_dense = min(num_dense, num_layers)
    return EXPERT_PATTERN.parse([DENSE * num_dense + EXPERTS * (num_layers - num_dense)], num_layers)


def _first_dense_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    num_dense, num_layers = hf_config.first_k_dense_replace, hf_config.num_hidden_layers
    if type(num_dense) is not int or not 0 <= num_dense < num_layers:
        raise UserError(
            f"the model has first_k_dense_replace = {one_line(num_dense)}: expected 0 to {num_layers - 1}, "
            "so that a layer has experts"
        )
    return {"moe_layer_freq": _dense_first(num_layers, num_dense)}


FIRST_DENSE = Conversion(
    megatron=("moe_layer_freq",),
    hf=("first_k_dense_replace",),
    to_hf=lambda model: {"first_k_dense_replace": _first_dense(model)},
    to_megatron=_first_dense_to_megatron,
    needed=lambda model: {"moe_layer_freq": _dense_first(model.num_layers, _first_dense(model))},
)


def _shared_size(model: ModelConfig) -> int | None:
    """Returns the size of shared experts that each have the size of an expert, at least of one."""
    size, unit = model.moe_shared_expert_intermediate_size or 0, model.moe_ffn_hidden_size
    return unit and max(size // unit, 1) * unit


SHARED_EXPERT = Conversion(
    megatron=("moe_shared_expert_intermediate_size",),
    hf=("n_shared_experts",),
    to_hf=lambda model: {
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.expert_hidden_size
    },
    to_megatron=lambda hf_config: {
        "moe_shared_expert_intermediate_size": _count(hf_config, "n_shared_experts")
        * _count(hf_config, "moe_intermediate_size")
    },
    needed=lambda model: {"moe_shared_expert_intermediate_size": _shared_size(model)},
)


def _groups_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    groups, chosen, top_k, experts = (
        _count(hf_config, name)
        for name in ("n_group", "topk_group", "num_experts_per_tok", "n_routed_experts")
    )
    if groups == chosen and experts % groups == 0:
        return dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"))
    if groups != chosen and top_k != 2 * chosen:
        raise UserError(
            f"the model has num_experts_per_tok = {top_k} and topk_group = {chosen}: its score of a group is "
            "the sum of two scores, which this program has only for num_experts_per_tok = 2 x topk_group"
        )
    return {}


def _needed_groups(model: ModelConfig) -> dict[str, Any]:
    if model.moe_router_num_groups is None:
        return {}
    return {"moe_router_group_topk": max(model.moe_router_topk // 2, 1)} | (
        {"moe_router_topk": model.moe_router_topk + 1} if model.moe_router_topk % 2 else {}
    )


GROUPS = Conversion(
    megatron=("moe_router_num_groups", "moe_router_group_topk"),
    hf=("n_group", "topk_group"),
    to_hf=lambda model: {
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
    },
    to_megatron=_groups_to_megatron,
    needed=_needed_groups,
)


def _weights_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    is_normalized, top_k = hf_config.norm_topk_prob, _count(hf_config, "num_experts_per_tok")
    if is_normalized is not (top_k > 1):
        raise UserError(
            f"the model has norm_topk_prob = {one_line(is_normalized)} and num_experts_per_tok = {top_k}: "
            f"expected {top_k > 1}, since this program divides sigmoid scores by their sum if there are "
            "several"
        )
    factor = hf_config.routed_scaling_factor
    return {} if factor == 1.0 else {"moe_router_topk_scaling_factor": factor}


SIGMOID_WEIGHTS = Conversion(
    megatron=("moe_router_topk_scaling_factor",),
    hf=("norm_topk_prob", "routed_scaling_factor"),
    to_hf=lambda model: {
        "norm_topk_prob": model.moe_router_topk > 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    },
    to_megatron=_weights_to_megatron,
)


def _check_next_tokens(settings: Mapping[str, Any], hf_config: PreTrainedConfig) -> None:
    if (found := settings.get(NEXT_TOKEN_LAYERS)) is not None:
        checked_count(NEXT_TOKEN_LAYERS, found, at_least=0)


# Layers for multi-token prediction, which transformers ignores, too.
NEXT_TOKENS = Conversion(
    hf=(NEXT_TOKEN_LAYERS, "num_mtp_layers"),
    to_hf=lambda model: {NEXT_TOKEN_LAYERS: 0},
    check_file=_check_next_tokens,
)

GLM4_MOE = replace(
    LLAMA,
    title="GLM 4.5",
    architecture="Glm4MoeForCausalLM",
    fields=(
        *_FIELDS_WITH_DENSE,
        ("num_experts", "n_routed_experts"),
        ("moe_router_num_groups", "n_group"),
        ("moe_router_group_topk", "topk_group"),
        ("qk_layernorm", "use_qk_norm"),
        ("add_qkv_bias", "attention_bias"),
    ),
    megatron_constants={
        **CONSTANTS,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    hf_constants={"hidden_act": "silu"},
    conversions=(
        *(QUERY_GROUPS, UNTIED, PARTIAL_ROPE),
        *(HAS_EXPERTS, FIRST_DENSE, SHARED_EXPERT, GROUPS, SIGMOID_WEIGHTS, NEXT_TOKENS),
    ),
    parameters=(
        *OUTSIDE_MLP,
        *(replace(norm, exists=lambda model, _: model.qk_layernorm) for norm in QK_NORM_PARAMETERS),
        replace(QKV_BIAS, exists=lambda model, _: model.add_qkv_bias),
        *DENSE_MLP,
        *EXPERT_PARAMETERS,
        Parameter(
            "{layer}.mlp.router.expert_bias",
            ("model.layers.{block}.mlp.gate.e_score_correction_bias",),
            exists=ModelConfig.has_experts,
            is_fp32=True,
        ),
        *(
            Parameter(
                parameter.megatron.replace(".mlp.", ".mlp.shared_expert."),
                tuple(name.replace(".mlp.", ".mlp.shared_experts.") for name in parameter.hf),
                parameter.transform,
                ModelConfig.has_experts,
            )
            for parameter in DENSE_MLP
        ),
    ),
    ignored=NOT_CONVERTED,
)
