"""Gemma 1, 2 and 3 (text): norms with a factor of 1 + weight, scaled embeddings, GELU in the gate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    LLAMA,
    OUTPUT_NORM,
    PARAMETERS,
    QK_NORM_PARAMETERS,
    QUERY_GROUPS,
    UNTIED,
    in_layer,
)
from megatron.checkpoint.huggingface.family import Conversion, checked_count
from megatron.checkpoint.huggingface.rope import LAYERED_ROPE, WINDOWS
from megatron.config import ModelConfig
from megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_CONSTANTS = {
    **CONSTANTS,
    "glu_activation": "geglu_tanh",
    "apply_layernorm_1p": True,
    "scale_embeddings": True,
}

GEMMA = replace(
    LLAMA,
    title="Gemma",
    architecture="GemmaForCausalLM",
    megatron_constants=_CONSTANTS,
    hf_constants={
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": None,
    },
    # transformers does not read this setting: it always uses the tanh approximation.
    ignored=("hidden_activation",),
)

# --- Gemma 2: a window in every second layer, four norms per layer, soft-capping ---


def _scale_to_hf(model: ModelConfig) -> dict[str, Any]:
    scalar = max(round(model.attention_scale**-2), 1)
    if not math.isclose(scalar**-0.5, model.attention_scale, rel_tol=1e-12):
        raise UserError(
            f"--softmax-scale {model.attention_scale} cannot be written for Gemma: expected 1 / sqrt(N) "
            "with an integer N (query_pre_attn_scalar)"
        )
    return {"query_pre_attn_scalar": scalar}


def _scale_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    scalar = checked_count("query_pre_attn_scalar", hf_config.query_pre_attn_scalar)
    return {} if scalar == hf_config.head_dim else {"softmax_scale": scalar**-0.5}


SCALE = Conversion(
    megatron=("softmax_scale",),
    hf=("query_pre_attn_scalar",),
    to_hf=_scale_to_hf,
    to_megatron=_scale_to_megatron,
)

_FOUR_NORMS = {**_CONSTANTS, "layer_arrangement": "pre-post-norm"}
_PARAMETERS = (
    *PARAMETERS,
    in_layer("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
    OUTPUT_NORM,
)

GEMMA2 = replace(
    GEMMA,
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    fields=(
        *LLAMA.fields,
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ),
    megatron_constants=_FOUR_NORMS,
    hf_constants={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": None,
    },
    conversions=(QUERY_GROUPS, UNTIED, WINDOWS, SCALE),
    parameters=_PARAMETERS,
    # transformers does not read hidden_act; cache_implementation selects the cache for generation.
    ignored=("hidden_act", "cache_implementation"),
)

# --- Gemma 3 (text): windows in five of six layers, RoPE settings of their own for these, and norms of the
# heads ---

GEMMA3 = replace(
    GEMMA2,
    title="Gemma 3",
    architecture="Gemma3ForCausalLM",
    fields=LLAMA.fields,
    megatron_constants={**_FOUR_NORMS, "qk_layernorm": True},
    hf_constants={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    conversions=(QUERY_GROUPS, UNTIED, LAYERED_ROPE, SCALE),
    parameters=(*_PARAMETERS, *QK_NORM_PARAMETERS),
    ignored=("cache_implementation",),
)
