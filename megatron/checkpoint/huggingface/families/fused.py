"""Relatives of Llama that store fused matrices: GLM-4 and Phi-3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    HEADS,
    LLAMA,
    QKV_BIAS,
    QUERY_GROUPS,
    UNTIED,
    WINDOW,
    in_layer,
    parameters_without,
)
from megatron.checkpoint.huggingface.family import INITIALIZATION, Transform, one_to_one
from megatron.checkpoint.huggingface.rope import PARTIAL_ROPE
from megatron.config import ModelConfig


def _swapped(x: Tensor, model: ModelConfig) -> Tensor:
    """Returns a tensor (gates, values) with the two halves exchanged."""
    return torch.cat(x.chunk(2)[::-1])


def _split_qkv(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    sizes = (model.query_width, model.key_width, model.key_width)
    return HEADS.to_megatron(parts[0].split(sizes), model)


FUSED_GATE = in_layer(
    "mlp.dense_h_to_4h.weight", "mlp.gate_up_proj.weight", transform=one_to_one(_swapped, _swapped)
)
FUSED_HEADS = in_layer(
    "self_attention.query_key_value.weight",
    "self_attn.qkv_proj.weight",
    transform=Transform(lambda x, model: [torch.cat([*HEADS.to_hf(x, model)])], _split_qkv),
)

GLM = replace(
    LLAMA,
    title="GLM 4",
    architecture="GlmForCausalLM",
    fields=(*LLAMA.fields, ("add_qkv_bias", "attention_bias")),
    megatron_constants={**CONSTANTS, "rotary_interleaved": True},
    hf_constants={"hidden_act": "silu"},
    conversions=(QUERY_GROUPS, UNTIED, PARTIAL_ROPE),
    parameters=(*parameters_without("mlp.dense_h_to_4h"), FUSED_GATE, QKV_BIAS),
    ignored=(),
)

# --- GLM-4-0414: further norms after the attention and the MLP ---

_NORMS = {"post_attention": "post_self_attn", "pre_mlp": "post_attention", "post_mlp": "post_mlp"}

GLM4 = replace(
    GLM,
    title="GLM-4-0414",
    architecture="Glm4ForCausalLM",
    megatron_constants={**GLM.megatron_constants, "layer_arrangement": "pre-post-norm"},
    parameters=(
        *parameters_without("mlp.dense_h_to_4h", "post_attention_layernorm"),
        *(
            in_layer(f"{own}_layernorm.weight", f"{theirs}_layernorm.weight")
            for own, theirs in _NORMS.items()
        ),
        FUSED_GATE,
        QKV_BIAS,
    ),
)

PHI3 = replace(
    LLAMA,
    title="Phi 3",
    architecture="Phi3ForCausalLM",
    fields=(*LLAMA.fields[:-1], WINDOW),
    training_fields=(
        *INITIALIZATION,
        *(("hidden_dropout", "resid_pdrop"), ("hidden_dropout", "embd_pdrop")),
        ("attention_dropout", "attention_dropout"),
    ),
    megatron_training={},
    hf_constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
    conversions=(QUERY_GROUPS, UNTIED, PARTIAL_ROPE),
    parameters=(
        *parameters_without("mlp.dense_h_to_4h", "self_attention.query_key_value"),
        *(FUSED_GATE, FUSED_HEADS),
    ),
    # This setting has no effect without longrope.
    ignored=("original_max_position_embeddings", "auto_map", "full_attn_mod", "interpolate_factor"),
)
