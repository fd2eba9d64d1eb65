"""GPT-NeoX and Pythia: RoPE on a part of each head; attention and MLP run in parallel."""

from __future__ import annotations

from megatron.checkpoint.huggingface.families.llama import UNTIED
from megatron.checkpoint.huggingface.family import (
    LM_HEAD,
    SIZES,
    Conversion,
    Family,
    Parameter,
    exact_or_tanh,
    layers_of_megatron,
    with_bias,
)
from megatron.checkpoint.huggingface.rope import PARTIAL_ROPE
from megatron.model.layer_list import WORD_EMBEDDINGS

# use_parallel_residual -> layer_arrangement.
_ARRANGEMENTS = {True: "parallel", False: "pre-norm"}
ARRANGEMENT = Conversion(
    megatron=("layer_arrangement",),
    hf=("use_parallel_residual",),
    to_hf=lambda model: {"use_parallel_residual": model.layer_arrangement == _ARRANGEMENTS[True]},
    to_megatron=lambda hf_config: {"layer_arrangement": _ARRANGEMENTS[bool(hf_config.use_parallel_residual)]},
    megatron_values={"layer_arrangement": tuple(_ARRANGEMENTS.values())},
)
_LAYER = "gpt_neox.layers.{block}"
_ATTENTION = f"{_LAYER}.attention"

GPT_NEOX = Family(
    title="GPT-NeoX",
    architecture="GPTNeoXForCausalLM",
    fields=(*SIZES, ("ffn_hidden_size", "intermediate_size"), ("layernorm_epsilon", "layer_norm_eps")),
    megatron_constants={"position_embedding_type": "rotary"},
    hf_constants={"attention_bias": True},
    conversions=(ARRANGEMENT, UNTIED, PARTIAL_ROPE, exact_or_tanh("hidden_act")),
    parameters=(
        Parameter(WORD_EMBEDDINGS, ("gpt_neox.embed_in.weight",)),
        *layers_of_megatron(_LAYER, attention="attention"),
        *with_bias("{final}", "gpt_neox.final_layer_norm"),
    ),
    head=Parameter("{head}.lm_head.weight", ("embed_out.weight",)),
    aliases={LM_HEAD: "embed_out.weight"},
    prefix="gpt_neox.",
    # Settings of heads for other tasks, and a setting for generation.
    ignored=("classifier_dropout", "is_decoder"),
    # The causal mask, the score of masked positions, and rotary frequencies.
    buffers=(f"{_ATTENTION}.bias", f"{_ATTENTION}.masked_bias", f"{_ATTENTION}.rotary_emb.inv_freq"),
)
