"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and often a tied LM head."""

from dataclasses import replace

from megatron.checkpoint.convert.huggingface.families.llama import (
    ATTENTION,
    CONSTANTS,
    FIELDS,
    HEADS,
    LLAMA,
    PARAMETERS,
)
from megatron.checkpoint.convert.huggingface.family import Parameter, equal_heads

QKV_BIAS = Parameter(
    "{layer}.self_attention.query_key_value.bias",
    tuple(f"{ATTENTION}.{part}_proj.bias" for part in "qkv"),
    HEADS,
)

QWEN2 = replace(
    LLAMA,
    title="Qwen 2",
    architecture="Qwen2ForCausalLM",
    fields=FIELDS,
    our_constants={**CONSTANTS, "add_qkv_bias": True},
    our_derived={"kv_channels": equal_heads},
    their_constants={"hidden_act": "silu", "use_sliding_window": False, "use_mrope": False},
    parameters=(*PARAMETERS, QKV_BIAS),
    # They act with use_sliding_window only.
    ignored=("sliding_window", "max_window_layers", "layer_types"),
)
