"""Qwen 3: Llama with a norm of each query and key head, a head dimension of its own and no biases."""

from dataclasses import replace

from megatron.checkpoint.huggingface.families.llama import (
    ATTENTION,
    CONSTANTS,
    CONVERSIONS,
    LLAMA,
    PARAMETERS,
)
from megatron.checkpoint.huggingface.families.qwen2 import WINDOW
from megatron.checkpoint.huggingface.family import Parameter

QK_NORM_PARAMETERS = tuple(
    Parameter(f"{{layer}}.self_attention.{part}_layernorm.weight", (f"{ATTENTION}.{part}_norm.weight",))
    for part in "qk"
)

QWEN3 = replace(
    LLAMA,
    title="Qwen 3",
    architecture="Qwen3ForCausalLM",
    megatron_constants={**CONSTANTS, "qk_layernorm": True},
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    conversions=(*CONVERSIONS, WINDOW),
    parameters=(*PARAMETERS, *QK_NORM_PARAMETERS),
    ignored=(),
)
