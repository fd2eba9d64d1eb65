"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and often a tied LM head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.families.llama import (
    ATTENTION,
    CONSTANTS,
    CONVERSIONS,
    FIELDS,
    HEADS,
    LLAMA,
    PARAMETERS,
)
from megatron.checkpoint.huggingface.family import Conversion, Parameter, equal_heads
from megatron.config import ModelConfig
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _window_to_hf(model: ModelConfig) -> dict[str, Any]:
    if model.window_size is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": model.window_size, "max_window_layers": 0}


def _window_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    # transformers makes them from max_window_layers if the file has none.
    kinds = hf_config.layer_types
    if kinds == ["full_attention"] * hf_config.num_hidden_layers:
        return {}
    if kinds == ["sliding_attention"] * hf_config.num_hidden_layers and hf_config.sliding_window is not None:
        return {"window_size": hf_config.sliding_window}
    raise UserError(
        f"the model has use_sliding_window = {hf_config.use_sliding_window} and layer_types = "
        f"{one_line(kinds)}: expected a window in all layers or in none"
    )


WINDOW = Conversion(
    megatron=("window_size",),
    hf=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    to_hf=_window_to_hf,
    to_megatron=_window_to_megatron,
)

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
    megatron_constants={**CONSTANTS, "add_qkv_bias": True},
    megatron_derived={"kv_channels": equal_heads},
    hf_constants={"hidden_act": "silu", "use_mrope": False},
    conversions=(*CONVERSIONS, WINDOW),
    parameters=(*PARAMETERS, QKV_BIAS),
    ignored=(),
)
