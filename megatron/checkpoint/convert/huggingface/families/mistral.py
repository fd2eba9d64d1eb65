"""Mistral: Llama with sliding-window attention in its first version, which is not supported."""

from dataclasses import replace

from megatron.checkpoint.convert.huggingface.families.llama import LLAMA

MISTRAL = replace(
    LLAMA,
    title="Mistral",
    architecture="MistralForCausalLM",
    # Mistral 7B v0.1 has a window of 4096 tokens; v0.2 and v0.3 have none.
    their_constants={"hidden_act": "silu", "sliding_window": None},
    ignored=(),
)
