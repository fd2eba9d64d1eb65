"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and often a tied LM head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.convert.huggingface.families.llama import (
    ATTENTION,
    CONSTANTS,
    CONVERSIONS,
    FIELDS,
    HEADS,
    LLAMA,
    PARAMETERS,
)
from megatron.checkpoint.convert.huggingface.family import Conversion, Parameter, equal_heads
from megatron.checkpoint.integrity.names import one_line
from megatron.config import ConfigError, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _window_to_theirs(model: ModelConfig) -> dict[str, Any]:
    if model.window_size is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": model.window_size, "max_window_layers": 0}


def _window_to_ours(theirs: PreTrainedConfig) -> dict[str, Any]:
    # transformers makes them from max_window_layers if the file has none.
    kinds = theirs.layer_types
    if kinds == ["full_attention"] * theirs.num_hidden_layers:
        return {}
    if kinds == ["sliding_attention"] * theirs.num_hidden_layers and theirs.sliding_window is not None:
        return {"window_size": theirs.sliding_window}
    raise ConfigError(
        f"the model has use_sliding_window = {theirs.use_sliding_window} and layer_types = "
        f"{one_line(kinds)}: expected a window in all layers or in none"
    )


WINDOW = Conversion(
    ours=("window_size",),
    theirs=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    to_theirs=_window_to_theirs,
    to_ours=_window_to_ours,
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
    our_constants={**CONSTANTS, "add_qkv_bias": True},
    our_derived={"kv_channels": equal_heads},
    their_constants={"hidden_act": "silu", "use_mrope": False},
    conversions=(*CONVERSIONS, WINDOW),
    parameters=(*PARAMETERS, QKV_BIAS),
    ignored=(),
)
