"""gpt-oss: attention sinks, a window in every second layer, biases everywhere, experts with clamped gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.families.experts import (
    HAS_EXPERTS,
    NOT_CONVERTED,
    ONLY_EXPERT_FIELDS,
    ONLY_EXPERTS,
    OUTSIDE_MLP,
    in_expert_layer,
)
from megatron.checkpoint.huggingface.families.llama import LLAMA, QKV_BIAS, QUERY_GROUPS, UNTIED, in_layer
from megatron.checkpoint.huggingface.family import Conversion, one_to_one
from megatron.checkpoint.huggingface.rope import WINDOWS
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _interleaved(x: Tensor) -> Tensor:
    """Returns x [experts, 2 f, ...], in which all values precede all gates, with gates and values
    alternating."""
    values, gates = x.chunk(2, 1)
    return torch.stack((gates, values), 2).flatten(1, 2)


def _stacked(x: Tensor) -> Tensor:
    """Returns x with all values before all gates, the inverse of `_interleaved`."""
    return torch.cat((x[:, 1::2], x[:, ::2]), 1)


def _check_quantization(settings: Mapping[str, Any], hf_config: PreTrainedConfig) -> None:
    found = settings.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method not in (None, "mxfp4"):
        raise UserError(f"the model has quantization_config = {one_line(found)}: expected mxfp4, or none")


# The files on the hub contain experts of 4 bits, which the import unpacks. An export never contains them.
MXFP4 = Conversion(hf=("quantization_config",), check_file=_check_quantization)
INTERLEAVED = one_to_one(lambda x, model: _interleaved(x), lambda x, model: _stacked(x))
INTERLEAVED_TRANSPOSED = one_to_one(
    lambda x, model: _interleaved(x).transpose(1, 2), lambda x, model: _stacked(x.transpose(1, 2))
)
TRANSPOSED = one_to_one(lambda x, model: x.transpose(1, 2), lambda x, model: x.transpose(1, 2))

GPT_OSS = replace(
    LLAMA,
    title="gpt-oss",
    architecture="GptOssForCausalLM",
    fields=(
        *(*ONLY_EXPERT_FIELDS, ("kv_channels", "head_dim"), ("num_experts", "num_local_experts")),
        ("activation_func_clamp_value", "swiglu_limit"),
    ),
    megatron_constants={
        "position_embedding_type": "rotary",
        "normalization": "RMSNorm",
        "softmax_type": "learnable",
        "glu_activation": "quick_geglu",
        "glu_linear_offset": 1.0,
    },
    hf_constants={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    conversions=(QUERY_GROUPS, UNTIED, WINDOWS, HAS_EXPERTS, ONLY_EXPERTS, MXFP4),
    parameters=(
        *(*OUTSIDE_MLP, QKV_BIAS, in_layer("self_attention.dense.bias", "self_attn.o_proj.bias")),
        in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
        *(in_expert_layer(f"mlp.router.{kind}", f"mlp.router.{kind}") for kind in ("weight", "bias")),
        in_expert_layer(
            "mlp.experts.dense_h_to_4h.weight", "mlp.experts.gate_up_proj", transform=INTERLEAVED_TRANSPOSED
        ),
        in_expert_layer(
            "mlp.experts.dense_h_to_4h.bias", "mlp.experts.gate_up_proj_bias", transform=INTERLEAVED
        ),
        in_expert_layer("mlp.experts.dense_4h_to_h.weight", "mlp.experts.down_proj", transform=TRANSPOSED),
        in_expert_layer("mlp.experts.dense_4h_to_h.bias", "mlp.experts.down_proj_bias"),
    ),
    # Older names of other settings.
    ignored=("experts_per_token", "initial_context_length", *NOT_CONVERTED),
)
