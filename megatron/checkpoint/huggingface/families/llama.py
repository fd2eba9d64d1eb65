"""Llama 1 to 3: rotary positions, RMS norms, SwiGLU, grouped queries. Mistral, Qwen 2 and 3, OLMo 2 and 3 are
described by their differences from Llama."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.family import (
    IDENTITY,
    INITIALIZATION,
    LM_HEAD,
    SIZES,
    Conversion,
    Family,
    Parameter,
    Transform,
    inverted,
)
from megatron.checkpoint.huggingface.rope import LAYERED_ROPE, ROPE
from megatron.config import ModelConfig
from megatron.errors import UserError, one_line
from megatron.model.layer_list import WORD_EMBEDDINGS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _split_heads(rows: Tensor, model: ModelConfig) -> list[Tensor]:
    """Returns queries, keys and values from rows ordered (groups, rows of a group). With
    --attention-output-gate the gates follow the queries."""
    grouped = rows.unflatten(0, (model.query_groups, -1))
    return [part.flatten(0, 1) for part in grouped.split(model.group_rows, dim=1)]


def _join_heads(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """Returns rows ordered (groups, rows of a group), the inverse of `_split_heads`."""
    return torch.cat([part.unflatten(0, (model.query_groups, -1)) for part in parts], dim=1).flatten(0, 1)


HEADS = Transform(_split_heads, _join_heads, slice_dim=0, needs_whole_groups=True)
# Megatron stacks (value, gate); Hugging Face has two tensors, the gate and the value ("up").
GATE = Transform(
    lambda x, model: x.chunk(2)[::-1], lambda parts, model: torch.cat(list(parts)[::-1]), slice_dim=0
)


def _megatron_groups(hf_config: PreTrainedConfig) -> dict[str, Any]:
    return groups_of(hf_config.num_attention_heads, hf_config.num_key_value_heads)


def groups_of(heads: Any, groups: Any) -> dict[str, Any]:
    """Returns the settings for these numbers of query heads and key heads. Raises UserError if they do not
    fit."""
    if type(heads) is not int or type(groups) is not int or groups < 1 or heads % groups:
        raise UserError(
            f"the model has num_key_value_heads = {one_line(groups)} and num_attention_heads = "
            f"{one_line(heads)}: expected num_attention_heads to be a multiple of num_key_value_heads"
        )
    return {} if groups == heads else {"group_query_attention": True, "num_query_groups": groups}


QUERY_GROUPS = Conversion(
    megatron=("group_query_attention", "num_query_groups"),
    hf=("num_key_value_heads",),
    to_hf=lambda model: {"num_key_value_heads": model.query_groups},
    to_megatron=_megatron_groups,
)
UNTIED = inverted("untie_embeddings_and_output_weights", "tie_word_embeddings")
CONVERSIONS = (QUERY_GROUPS, UNTIED, ROPE)

FIELDS = (*SIZES, ("ffn_hidden_size", "intermediate_size"), ("layernorm_epsilon", "rms_norm_eps"))
CONSTANTS = {
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "disable_bias_linear": True,
}


def in_layer(megatron: str, *hf: str, transform: Transform = IDENTITY, **settings: Any) -> Parameter:
    """Returns a parameter of a transformer layer. megatron, hf: its names in the layer. settings: fields of
    `Parameter`."""
    names = tuple(f"model.layers.{{block}}.{name}" for name in hf)
    return Parameter(f"{{layer}}.{megatron}", names, transform, **settings)


def _heads_from(*parts: str) -> Parameter:
    names = (f"self_attn.{part}_proj.weight" for part in parts)
    return in_layer("self_attention.query_key_value.weight", *names, transform=HEADS)


def with_gate(parameters: Sequence[Parameter], part: str) -> tuple[Parameter, ...]:
    """Returns the parameters together with the gate of --attention-output-gate, named
    `self_attn.PART_proj`."""
    heads = _heads_from("q", part, "k", "v")
    return tuple(heads if each.megatron == heads.megatron else each for each in parameters)


ATTENTION = "model.layers.{block}.self_attn"
PARAMETERS = (
    Parameter(WORD_EMBEDDINGS, ("model.embed_tokens.weight",)),
    in_layer("input_layernorm.weight", "input_layernorm.weight"),
    _heads_from("q", "k", "v"),
    in_layer("self_attention.dense.weight", "self_attn.o_proj.weight"),
    in_layer("post_attention_layernorm.weight", "post_attention_layernorm.weight"),
    in_layer("mlp.dense_h_to_4h.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", transform=GATE),
    in_layer("mlp.dense_4h_to_h.weight", "mlp.down_proj.weight"),
    Parameter("{final}.weight", ("model.norm.weight",)),
)


def parameters_without(*names: str) -> tuple[Parameter, ...]:
    """Returns Llama's parameters without those modules of a transformer layer that have these names."""
    return tuple(
        each
        for each in PARAMETERS
        if not each.megatron.startswith(tuple(f"{{layer}}.{name}." for name in names))
    )


HEAD = Parameter("{head}.lm_head.weight", (LM_HEAD,))

LLAMA = Family(
    title="Llama",
    architecture="LlamaForCausalLM",
    fields=(*FIELDS, ("kv_channels", "head_dim")),
    training_fields=(*INITIALIZATION, ("attention_dropout", "attention_dropout")),
    megatron_constants=CONSTANTS,
    megatron_training={"hidden_dropout": 0.0},
    hf_constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    conversions=CONVERSIONS,
    parameters=PARAMETERS,
    head=HEAD,
    buffers=(f"{ATTENTION}.rotary_emb.inv_freq",),
    prefix="model.",
    # A setting of older transformers, which reproduces the sliced matrix products of one training layout.
    ignored=("pretraining_tp",),
)

# --- Mistral: its first version has sliding-window attention ---

# Mistral 7B v0.1 has a window of 4096 tokens; v0.2 and v0.3 have none.
WINDOW = ("window_size", "sliding_window")

MISTRAL = replace(
    LLAMA,
    title="Mistral",
    architecture="MistralForCausalLM",
    fields=(*LLAMA.fields, WINDOW),
    hf_constants={"hidden_act": "silu"},
    ignored=(),
)

# --- Qwen 2 and 2.5: biases of queries, keys and values, and often a tied LM head ---


def _window_to_hf(model: ModelConfig) -> dict[str, Any]:
    if model.window_size is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": model.window_size, "max_window_layers": 0}


def _window_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    # transformers derives layer_types from max_window_layers if a file has no layer_types.
    kinds = hf_config.layer_types
    if kinds == ["full_attention"] * hf_config.num_hidden_layers:
        return {}
    if kinds == ["sliding_attention"] * hf_config.num_hidden_layers and hf_config.sliding_window is not None:
        return {"window_size": hf_config.sliding_window}
    raise UserError(
        f"the model has use_sliding_window = {hf_config.use_sliding_window} and layer_types = "
        f"{one_line(kinds)}: expected a window in all layers or in none"
    )


QWEN_WINDOW = Conversion(
    megatron=("window_size",),
    hf=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    to_hf=_window_to_hf,
    to_megatron=_window_to_megatron,
)
# For families whose windows depend on other settings.
NO_WINDOW = replace(QWEN_WINDOW, needed=lambda _model: {"window_size": None})

QKV_BIAS = in_layer(
    "self_attention.query_key_value.bias",
    *(f"self_attn.{part}_proj.bias" for part in "qkv"),
    transform=HEADS,
    exists=lambda model, _: model.qkv_bias,
)

QWEN2 = replace(
    LLAMA,
    title="Qwen 2",
    architecture="Qwen2ForCausalLM",
    fields=FIELDS,
    megatron_constants={**CONSTANTS, "add_qkv_bias": True},
    hf_constants={"hidden_act": "silu", "use_mrope": False},
    conversions=(*CONVERSIONS, QWEN_WINDOW),
    parameters=(*PARAMETERS, QKV_BIAS),
    ignored=(),
)

# --- Qwen 3: a norm of each query and key head, a separate head dimension and no biases ---

QK_NORM_PARAMETERS = tuple(
    in_layer(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight") for part in "qk"
)

QWEN3 = replace(
    LLAMA,
    title="Qwen 3",
    architecture="Qwen3ForCausalLM",
    megatron_constants={**CONSTANTS, "qk_layernorm": True},
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    conversions=(*CONVERSIONS, QWEN_WINDOW),
    parameters=(*PARAMETERS, *QK_NORM_PARAMETERS),
    ignored=(),
)

# --- OLMo 2: norms after attention and MLP, one norm over all query heads, and one over all key heads ---

OUTPUT_NORM = in_layer("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight")

OLMO2 = replace(
    LLAMA,
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    fields=FIELDS,
    megatron_constants={
        **CONSTANTS,
        "layer_arrangement": "post-norm",
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
    },
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    parameters=(
        *parameters_without("input_layernorm"),
        *QK_NORM_PARAMETERS,
        OUTPUT_NORM,
    ),
    ignored=(),
)

# --- OLMo 3: OLMo 2 with a window in three of four layers; RoPE scaling applies to the fourth ---

OLMO3 = replace(
    OLMO2,
    title="OLMo 3",
    architecture="Olmo3ForCausalLM",
    conversions=(QUERY_GROUPS, UNTIED, LAYERED_ROPE),
)
