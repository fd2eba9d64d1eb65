"""Mistral: Llama, in its first version with sliding-window attention."""

from __future__ import annotations

from dataclasses import replace

from megatron.checkpoint.huggingface.families.llama import CONVERSIONS, LLAMA
from megatron.checkpoint.huggingface.family import Conversion

# Mistral 7B v0.1 has a window of 4096 tokens; v0.2 and v0.3 have none.
WINDOW = Conversion(
    megatron=("window_size",),
    hf=("sliding_window",),
    to_hf=lambda model: {"sliding_window": model.window_size},
    to_megatron=lambda hf_config: (
        {} if hf_config.sliding_window is None else {"window_size": hf_config.sliding_window}
    ),
)

MISTRAL = replace(
    LLAMA,
    title="Mistral",
    architecture="MistralForCausalLM",
    hf_constants={"hidden_act": "silu"},
    conversions=(*CONVERSIONS, WINDOW),
    ignored=(),
)
