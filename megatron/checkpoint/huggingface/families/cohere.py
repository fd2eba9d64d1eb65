"""Cohere's Command R, R7B and A, and Aya: attention and MLP run in parallel after one norm without bias."""

from __future__ import annotations

from dataclasses import replace

from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    LLAMA,
    QUERY_GROUPS,
    UNTIED,
    parameters_without,
)
from megatron.checkpoint.huggingface.family import SIZES
from megatron.checkpoint.huggingface.rope import rotary_in_windows

COHERE = replace(
    LLAMA,
    title="Cohere",
    architecture="CohereForCausalLM",
    fields=(
        *SIZES,
        ("ffn_hidden_size", "intermediate_size"),
        ("layernorm_epsilon", "layer_norm_eps"),
        ("logit_scale", "logit_scale"),
    ),
    megatron_constants={
        **CONSTANTS,
        "normalization": "LayerNormWithoutBias",
        "layer_arrangement": "parallel-one-norm",
        "rotary_interleaved": True,
    },
    hf_constants={"hidden_act": "silu", "attention_bias": False, "use_qk_norm": False},
    parameters=parameters_without("post_attention_layernorm"),
    ignored=(),
)

# --- Command R7B and A: rotary embeddings only in layers with a window ---

COHERE2 = replace(
    COHERE,
    title="Cohere 2",
    architecture="Cohere2ForCausalLM",
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    conversions=(QUERY_GROUPS, UNTIED, rotary_in_windows(without_windows=False)),
    # The size of a head, which the other sizes determine, and settings of older versions.
    ignored=(
        "head_dim",
        "cache_implementation",
        "position_embedding_type",
        "rotary_pct",
        "use_embedding_sharing",
    )
    + ("use_gated_activation", "use_parallel_block", "use_parallel_embedding", "use_qk_norm"),
)
