"""Mixtures of experts, described by their differences from Llama: Mixtral, OLMoE, FlexOlmo, Qwen 2 and 3,
Mellum, GLM 4.5.

The coefficient of the balance loss (router_aux_loss_coef) is not converted. transformers pools the counts
of all layers and does not divide them by the experts per token, so no coefficient of this program has an
equal effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    CONVERSIONS,
    FIELDS,
    LLAMA,
    NO_WINDOW,
    OLMO2,
    PARAMETERS,
    QK_NORM_PARAMETERS,
    QKV_BIAS,
    QUERY_GROUPS,
    UNTIED,
    WINDOW,
    in_layer,
    parameters_without,
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
from megatron.checkpoint.huggingface.rope import LAYERED_ROPE, PARTIAL_ROPE
from megatron.config import ModelConfig
from megatron.config.sections.layer_pattern import DENSE, EXPERT_PATTERN, EXPERTS
from megatron.errors import UserError, one_line
from megatron.model.layer_list import WORD_EMBEDDINGS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _join_gates(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """Returns the experts' gates and values, [experts, 2 x rows, columns]. In `parts` they alternate."""
    rows = [part for gate, value in zip(parts[::2], parts[1::2], strict=True) for part in (value, gate)]
    return torch.cat(rows).unflatten(0, (len(rows) // 2, -1))


# As in a dense MLP, Megatron stacks (value, gate).
EXPERT_GATES = Transform(
    lambda x, model: [part for expert in x for part in expert.chunk(2)[::-1]], _join_gates
)
STACKED = Transform(lambda x, model: list(x), lambda parts, model: torch.stack(list(parts)))


in_expert_layer = partial(in_layer, exists=ModelConfig.has_experts)


def expert_parameters(
    module: str, gate: str, value: str, output: str, router: str = "gate"
) -> tuple[Parameter, ...]:
    """Returns the router and the experts of a layer. module: the name of the MLP. gate, value, output: the
    names of an expert's matrices. router: the name of the router."""
    first, value, last = (f"{module}.experts.{{expert}}.{matrix}.weight" for matrix in (gate, value, output))
    return (
        in_expert_layer("mlp.router.weight", f"{module}.{router}.weight"),
        in_expert_layer("mlp.experts.dense_h_to_4h.weight", first, value, transform=EXPERT_GATES),
        in_expert_layer("mlp.experts.dense_4h_to_h.weight", last, transform=STACKED),
    )


_MLP = "{layer}.mlp."
OUTSIDE_MLP = parameters_without("mlp")
DENSE_MLP = tuple(
    replace(parameter, exists=lambda model, block: not model.has_experts(block))
    for parameter in PARAMETERS
    if parameter.megatron.startswith(_MLP)
)
EXPERT_PARAMETERS = expert_parameters("mlp", "gate_proj", "up_proj", "down_proj")


def shared_expert(name: str) -> tuple[Parameter, ...]:
    """Returns the parameters of the shared expert. name: the name of its module."""
    return tuple(
        replace(
            parameter,
            megatron=parameter.megatron.replace(".mlp.", ".mlp.shared_expert."),
            hf=tuple(key.replace(".mlp.", f".mlp.{name}.") for key in parameter.hf),
            exists=lambda model, block: (
                model.has_experts(block) and model.moe_shared_expert_intermediate_size is not None
            ),
        )
        for parameter in DENSE_MLP
    )


TOP_K = ("moe_router_topk", "num_experts_per_tok")
# Fields of families in which all layers have experts. FIELDS_WITH_DENSE is for families that also have dense
# layers.
ONLY_EXPERT_FIELDS = (
    *SIZES,
    ("moe_ffn_hidden_size", "intermediate_size"),
    ("layernorm_epsilon", "rms_norm_eps"),
    TOP_K,
)
EXPERT_SIZE = ("moe_ffn_hidden_size", "moe_intermediate_size")
FIELDS_WITH_DENSE = (*FIELDS, TOP_K, ("kv_channels", "head_dim"), EXPERT_SIZE)
NOT_CONVERTED = ("router_aux_loss_coef", "output_router_logits")
# Dense models belong to other families.
HAS_EXPERTS = Conversion(needed=lambda model: {"num_experts": model.num_experts or 8})
# For families without dense layers: the size of a dense MLP has no effect.
ONLY_EXPERTS = Conversion(
    megatron=("ffn_hidden_size",),
    to_megatron=lambda hf_config: {"ffn_hidden_size": hf_config.intermediate_size},
)
# Dividing the softmax scores of the chosen experts by their sum is equal to a softmax over the chosen
# experts.
RENORMALIZED = inverted("moe_router_pre_softmax", "norm_topk_prob")

MIXTRAL_EXPERTS = expert_parameters("block_sparse_moe", "w1", "w3", "w2")
MIXTRAL = replace(
    LLAMA,
    title="Mixtral",
    architecture="MixtralForCausalLM",
    fields=(*ONLY_EXPERT_FIELDS, ("kv_channels", "head_dim"), ("num_experts", "num_local_experts"), WINDOW),
    hf_constants={"hidden_act": "silu"},
    conversions=(*CONVERSIONS, HAS_EXPERTS, ONLY_EXPERTS),
    parameters=(*OUTSIDE_MLP, *MIXTRAL_EXPERTS),
    # Noise that is added to the router's input during training.
    ignored=("router_jitter_noise", *NOT_CONVERTED),
)

# --- OLMoE: one norm over all query heads, and one over all key heads ---

OLMOE = replace(
    LLAMA,
    title="OLMoE",
    architecture="OlmoeForCausalLM",
    fields=(*ONLY_EXPERT_FIELDS, ("num_experts", "num_experts")),
    megatron_constants={**CONSTANTS, "qk_layernorm": True, "qk_layernorm_scope": "projection"},
    hf_constants={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    conversions=(*CONVERSIONS, HAS_EXPERTS, ONLY_EXPERTS, RENORMALIZED),
    parameters=(*OUTSIDE_MLP, *QK_NORM_PARAMETERS, *EXPERT_PARAMETERS),
    ignored=NOT_CONVERTED,
)

# --- FlexOlmo: OLMoE with norms after the attention and the MLP ---

FLEX_OLMO = replace(
    OLMOE,
    title="FlexOlmo",
    architecture="FlexOlmoForCausalLM",
    megatron_constants={**OLMOE.megatron_constants, **OLMO2.megatron_constants},
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    parameters=(
        *(each for each in OLMO2.parameters if not each.megatron.startswith(_MLP)),
        *EXPERT_PARAMETERS,
    ),
)

# --- Qwen 2 and 3: dense layers anywhere ---


def _expert_layers(has_experts: Sequence[bool], given: str) -> dict[str, Any]:
    """Returns the field of ModelConfig that names the layers with experts. given: text about config.json's
    settings, for the error message."""
    if not any(has_experts):
        raise UserError(f"the model has {given}: no layer has experts")
    letters = [EXPERTS if each else DENSE for each in has_experts]
    return {"moe_layer_freq": EXPERT_PATTERN.parse(letters, len(letters))}


def _qwen_layers_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    num_layers, dense = hf_config.num_hidden_layers, hf_config.mlp_only_layers
    step = checked_count("decoder_sparse_step", hf_config.decoder_sparse_step)
    without = {*dense}
    has_experts = [layer not in without and (layer + 1) % step == 0 for layer in range(num_layers)]
    return _expert_layers(
        has_experts, f"mlp_only_layers = {one_line(dense)} and decoder_sparse_step = {step}"
    )


QWEN_LAYERS = Conversion(
    megatron=("moe_layer_freq",),
    hf=("decoder_sparse_step", "mlp_only_layers"),
    to_hf=lambda model: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not model.has_experts(layer)],
    },
    to_megatron=_qwen_layers_to_megatron,
)
# If use_sliding_window is false, transformers sets sliding_window to None.
USES_WINDOW = Conversion(
    hf=("use_sliding_window",),
    to_hf=lambda model: {"use_sliding_window": model.window_size is not None},
)

QWEN3_MOE = replace(
    LLAMA,
    title="Qwen 3 with experts",
    architecture="Qwen3MoeForCausalLM",
    fields=(*FIELDS_WITH_DENSE, ("num_experts", "num_experts"), WINDOW),
    megatron_constants={**CONSTANTS, "qk_layernorm": True},
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    conversions=(*CONVERSIONS, USES_WINDOW, HAS_EXPERTS, QWEN_LAYERS, RENORMALIZED),
    parameters=(*OUTSIDE_MLP, *QK_NORM_PARAMETERS, *DENSE_MLP, *EXPERT_PARAMETERS),
    # Published models have this setting, and transformers does not read it.
    ignored=("max_window_layers", *NOT_CONVERTED),
)

QWEN2_MOE = replace(
    QWEN3_MOE,
    title="Qwen 2 with experts",
    architecture="Qwen2MoeForCausalLM",
    fields=(
        *FIELDS,
        *(TOP_K, EXPERT_SIZE, ("num_experts", "num_experts"), ("add_qkv_bias", "qkv_bias")),
        ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    ),
    megatron_constants={**CONSTANTS, "moe_shared_expert_gate": True},
    hf_constants={"hidden_act": "silu"},
    conversions=(*CONVERSIONS, NO_WINDOW, HAS_EXPERTS, QWEN_LAYERS, RENORMALIZED),
    parameters=(
        *(*OUTSIDE_MLP, QKV_BIAS, *DENSE_MLP, *EXPERT_PARAMETERS, *shared_expert("shared_expert")),
        in_expert_layer("mlp.shared_expert_gate.weight", "mlp.shared_expert_gate.weight"),
    ),
)

# --- Mellum: Qwen 3 with windows in some layers, which have RoPE settings of their own ---


def _kinds_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    kinds, num_layers = hf_config.mlp_layer_types, hf_config.num_hidden_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {"dense", "sparse"}:
        raise UserError(
            f"the model has mlp_layer_types = {one_line(kinds)}: expected dense or sparse for each of the "
            f"{num_layers} layers"
        )
    return _expert_layers([kind == "sparse" for kind in kinds], f"mlp_layer_types = {one_line(kinds)}")


MLP_LAYER_TYPES = Conversion(
    megatron=("moe_layer_freq",),
    hf=("mlp_layer_types",),
    to_hf=lambda model: {
        "mlp_layer_types": [
            "sparse" if model.has_experts(layer) else "dense" for layer in range(model.num_layers)
        ]
    },
    to_megatron=_kinds_to_megatron,
)

MELLUM = replace(
    QWEN3_MOE,
    title="Mellum",
    architecture="MellumForCausalLM",
    fields=(*FIELDS_WITH_DENSE, ("num_experts", "num_experts")),
    conversions=(QUERY_GROUPS, UNTIED, LAYERED_ROPE, HAS_EXPERTS, MLP_LAYER_TYPES, RENORMALIZED),
    ignored=NOT_CONVERTED,
)

# --- GLM 4.5: sigmoid scores with a bias, a shared expert, and dense layers first ---


def _count(hf_config: PreTrainedConfig, name: str) -> int:
    return checked_count(name, getattr(hf_config, name))


def _first_dense(model: ModelConfig) -> int:
    """Returns the number of layers before the first layer with experts."""
    return next((layer for layer in range(model.num_layers) if model.has_experts(layer)), model.num_layers)


def _dense_first(num_layers: int, num_dense: int) -> tuple[str, ...]:
    return EXPERT_PATTERN.parse([DENSE * num_dense + EXPERTS * (num_layers - num_dense)], num_layers)


def first_dense(setting: str) -> Conversion:
    """Returns the conversion of the number of layers before the first layer with experts."""

    def to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
        num_dense, num_layers = getattr(hf_config, setting, 0), hf_config.num_hidden_layers
        if type(num_dense) is not int or not 0 <= num_dense < num_layers:
            raise UserError(
                f"the model has {setting} = {one_line(num_dense)}: expected 0 to {num_layers - 1}, so that a "
                "layer has experts"
            )
        return {"moe_layer_freq": _dense_first(num_layers, num_dense)}

    return Conversion(
        megatron=("moe_layer_freq",),
        hf=(setting,),
        to_hf=lambda model: {setting: _first_dense(model)},
        to_megatron=to_megatron,
        needed=lambda model: {"moe_layer_freq": _dense_first(model.num_layers, _first_dense(model))},
    )


FIRST_DENSE = first_dense("first_k_dense_replace")


def shared_size(model: ModelConfig) -> int | None:
    """Returns the width of the shared experts, rounded down to a multiple of an expert's width, but at least
    one such width. Returns None if the model has no width for experts."""
    size, unit = model.moe_shared_expert_intermediate_size or 0, model.moe_ffn_hidden_size
    return unit and max(size // unit, 1) * unit


def shared_experts(setting: str) -> Conversion:
    """Returns the conversion of the number of shared experts."""
    return Conversion(
        megatron=("moe_shared_expert_intermediate_size",),
        hf=(setting,),
        to_hf=lambda model: {
            setting: (model.moe_shared_expert_intermediate_size or 0) // model.expert_hidden_size
        },
        to_megatron=lambda hf_config: {
            "moe_shared_expert_intermediate_size": _count(hf_config, setting)
            * _count(hf_config, "moe_intermediate_size")
        },
        needed=lambda model: {"moe_shared_expert_intermediate_size": shared_size(model)},
    )


GROUP_FIELDS = (("moe_router_num_groups", "n_group"), ("moe_router_group_topk", "topk_group"))
NO_GROUPS = dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"))


def groups_of_experts(hf_config: PreTrainedConfig, experts_of_score: int) -> dict[str, Any]:
    """Returns the settings for groups of experts. A group's score sums `experts_of_score` experts."""
    name = "n_routed_experts" if hasattr(hf_config, "n_routed_experts") else "num_experts"
    settings = ("n_group", "topk_group", "num_experts_per_tok", name)
    groups, chosen, top_k, experts = (_count(hf_config, setting) for setting in settings)
    if groups == chosen and experts % groups == 0:
        return NO_GROUPS
    is_derived = top_k == experts_of_score * chosen
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        **({} if is_derived else {"moe_router_group_score_topk": experts_of_score}),
    }


def groups_conversion(experts_of_score: int) -> Conversion:
    """Returns the conversion for groups of experts. A group's score sums `experts_of_score` experts."""

    def needed(model: ModelConfig) -> dict[str, Any]:
        if model.moe_router_num_groups is None or model.experts_of_group_score == experts_of_score:
            return {}
        return {"moe_router_group_score_topk": experts_of_score}

    return Conversion(
        megatron=("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk"),
        hf=("n_group", "topk_group"),
        to_hf=lambda model: {
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
        },
        to_megatron=lambda hf_config: groups_of_experts(hf_config, experts_of_score),
        needed=needed,
    )


SHARED_EXPERTS = shared_experts("n_shared_experts")
GROUPS = groups_conversion(2)


def _weights_to_megatron(hf_config: PreTrainedConfig, scale: str = "routed_scaling_factor") -> dict[str, Any]:
    is_normalized = getattr(hf_config, "norm_topk_prob", True)
    top_k = _count(hf_config, "num_experts_per_tok")
    if is_normalized is not (top_k > 1):
        raise UserError(
            f"the model has norm_topk_prob = {one_line(is_normalized)} and num_experts_per_tok = {top_k}: "
            f"expected {top_k > 1}, since this program divides sigmoid scores by their sum if there are "
            "several"
        )
    factor = getattr(hf_config, scale, 1.0)
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


def always_normalized(scale: str | None = None) -> Conversion:
    """Returns the conversion for families that always divide sigmoid scores by their sum. scale: the setting
    that multiplies the quotients; None if there is none."""
    fields = () if scale is None else ("moe_router_topk_scaling_factor",)
    return Conversion(
        megatron=fields,
        hf=fields and (scale or "",),
        to_hf=lambda model: {scale: model.moe_router_topk_scaling_factor or 1.0} if scale else {},
        to_megatron=partial(_weights_to_megatron, scale=scale or ""),
        needed=lambda model: {"moe_router_topk": max(model.moe_router_topk, 2)},
    )


def _check_next_tokens(settings: Mapping[str, Any], hf_config: PreTrainedConfig) -> None:
    if (found := settings.get(NEXT_TOKEN_LAYERS)) is not None:
        checked_count(NEXT_TOKEN_LAYERS, found, at_least=0)


# Layers for multi-token prediction. transformers uses them only when it generates text.
NEXT_TOKENS = Conversion(
    megatron=("mtp_num_layers",),
    hf=(NEXT_TOKEN_LAYERS, "num_mtp_layers"),
    to_hf=lambda model: {NEXT_TOKEN_LAYERS: model.mtp_num_layers or 0},
    to_megatron=lambda hf_config: {"mtp_num_layers": getattr(hf_config, NEXT_TOKEN_LAYERS, None) or None},
    check_file=_check_next_tokens,
)
_LATER = "model.layers.{block}."
_NEXT_TOKEN_MODULES = {
    **{name: name for name in ("enorm", "hnorm", "eh_proj")},
    "final_layernorm": "shared_head.norm",
}


def with_next_tokens(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Returns the parameters of a model and of its layers for multi-token prediction. The layers for
    multi-token prediction have DeepSeek-V3's names: they continue the numbers of the transformer layers, with
    names of further modules. Each of them has a copy of the word embedding."""
    in_layers = [parameter for parameter in parameters if parameter.megatron.startswith("{layer}.")]
    return (
        *(
            replace(parameter, copies=(f"{_LATER}embed_tokens.weight",))
            if parameter.megatron == WORD_EMBEDDINGS
            else parameter
            for parameter in parameters
        ),
        *(
            replace(parameter, megatron=parameter.megatron.replace("{layer}.", "{mtp}.transformer_layer."))
            for parameter in in_layers
        ),
        *(
            Parameter(f"{{mtp}}.{own}.weight", (f"{_LATER}{name}.weight",))
            for own, name in _NEXT_TOKEN_MODULES.items()
        ),
    )


assert LLAMA.head is not None
NEXT_TOKEN_HEAD = replace(LLAMA.head, copies=(f"{_LATER}shared_head.head.weight",))
"""The LM head. Each layer for multi-token prediction has a copy of it."""

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def choice_bias(name: str) -> Parameter:
    """Returns the bias of the scores that choose experts. name: the bias's name in the layer."""
    return in_expert_layer("mlp.router.expert_bias", name, is_fp32=True)


MLP_PARAMETERS = (*DENSE_MLP, *EXPERT_PARAMETERS, *shared_expert("shared_experts"))
EXPERT_BIAS = choice_bias("mlp.gate.e_score_correction_bias")
GLM4_MOE = replace(
    LLAMA,
    title="GLM 4.5",
    architecture="Glm4MoeForCausalLM",
    fields=(
        *FIELDS_WITH_DENSE,
        ("num_experts", "n_routed_experts"),
        *GROUP_FIELDS,
        ("qk_layernorm", "use_qk_norm"),
        ("add_qkv_bias", "attention_bias"),
    ),
    megatron_constants={**CONSTANTS, **SIGMOID},
    hf_constants={"hidden_act": "silu"},
    conversions=(
        *(QUERY_GROUPS, UNTIED, PARTIAL_ROPE),
        *(HAS_EXPERTS, FIRST_DENSE, SHARED_EXPERTS, GROUPS, SIGMOID_WEIGHTS, NEXT_TOKENS),
    ),
    parameters=with_next_tokens(
        (
            *OUTSIDE_MLP,
            *(replace(norm, exists=lambda model, _: model.qk_layernorm) for norm in QK_NORM_PARAMETERS),
            *(QKV_BIAS, *MLP_PARAMETERS, EXPERT_BIAS),
        )
    ),
    head=NEXT_TOKEN_HEAD,
    ignored=NOT_CONVERTED,
)
