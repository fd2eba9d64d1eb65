"""Gemma 3 (text): windows in five of six layers, four norms per layer with a factor of 1 + weight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    LLAMA,
    PARAMETERS,
    QK_NORM_PARAMETERS,
    QUERY_GROUPS,
    UNTIED,
)
from megatron.checkpoint.huggingface.family import Conversion, Parameter, checked_count
from megatron.checkpoint.huggingface.rope import LAYERED_ROPE
from megatron.config import ModelConfig
from megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _scale_to_hf(model: ModelConfig) -> dict[str, Any]:
    scalar = max(round(model.attention_scale**-2), 1)
    if not math.isclose(scalar**-0.5, model.attention_scale, rel_tol=1e-12):
        raise UserError(
            f"--softmax-scale {model.attention_scale} cannot be written for Gemma 3: expected 1 / sqrt(N) "
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
_NORMS = {"pre_mlp": "pre_feedforward", "post_mlp": "post_feedforward"}

GEMMA3 = replace(
    LLAMA,
    title="Gemma 3",
    architecture="Gemma3ForCausalLM",
    megatron_constants={
        **CONSTANTS,
        "glu_activation": "geglu_tanh",
        "layer_arrangement": "pre-post-norm",
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "scale_embeddings": True,
    },
    hf_constants={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    conversions=(QUERY_GROUPS, UNTIED, LAYERED_ROPE, SCALE),
    parameters=(
        *PARAMETERS,
        *QK_NORM_PARAMETERS,
        *(
            Parameter(
                f"{{layer}}.{own}_layernorm.weight", (f"model.layers.{{block}}.{theirs}_layernorm.weight",)
            )
            for own, theirs in _NORMS.items()
        ),
    ),
    # Selects an implementation of the cache for generation.
    ignored=("cache_implementation",),
)
