"""Falcon 7B: multi-query attention and the MLP in parallel after one norm, rotary positions, no biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.families.llama import HEAD, UNTIED
from megatron.checkpoint.huggingface.family import (
    LAYER_MODULES,
    SIZES,
    Conversion,
    Family,
    Parameter,
    exact_or_tanh,
    with_bias,
)
from megatron.checkpoint.huggingface.rope import ROPE
from megatron.errors import UserError, one_line
from megatron.model.layer_list import WORD_EMBEDDINGS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _groups_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    heads, groups = hf_config.num_attention_heads, hf_config.num_kv_heads
    if not hf_config.multi_query and groups != heads:
        raise UserError(
            f"the model has num_kv_heads = {one_line(groups)} without multi_query: expected "
            f"num_attention_heads, {one_line(heads)}"
        )
    return {"group_query_attention": bool(hf_config.multi_query)}


def _one_norm(hf_config: PreTrainedConfig) -> dict[str, Any]:
    if hf_config.num_ln_in_parallel_attn not in (None, 1):
        raise UserError(
            "the model has num_ln_in_parallel_attn = "
            f"{one_line(hf_config.num_ln_in_parallel_attn)}: expected 1"
        )
    return {}


QUERY_GROUPS = Conversion(
    megatron=("group_query_attention",),
    hf=("multi_query", "num_kv_heads"),
    to_hf=lambda model: {
        "multi_query": model.group_query_attention,
        "num_kv_heads": 1 if model.group_query_attention else model.num_attention_heads,
    },
    to_megatron=_groups_to_megatron,
)
ONE_NORM = Conversion(
    hf=("num_ln_in_parallel_attn",),
    to_hf=lambda _model: {"num_ln_in_parallel_attn": 1},
    to_megatron=_one_norm,
)
_LAYER = "transformer.h.{block}"

FALCON = Family(
    title="Falcon 7B",
    architecture="FalconForCausalLM",
    fields=(*SIZES, ("ffn_hidden_size", "ffn_hidden_size"), ("layernorm_epsilon", "layer_norm_epsilon")),
    megatron_constants={
        "position_embedding_type": "rotary",
        "layer_arrangement": "parallel-one-norm",
        "disable_bias_linear": True,
    },
    hf_constants={
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "bias": False,
        "new_decoder_architecture": False,
        "parallel_attn": True,
    },
    conversions=(QUERY_GROUPS, ONE_NORM, UNTIED, ROPE, exact_or_tanh("activation")),
    parameters=(
        Parameter(WORD_EMBEDDINGS, ("transformer.word_embeddings.weight",)),
        *with_bias("{layer}.input_layernorm", f"{_LAYER}.input_layernorm"),
        *(
            Parameter(f"{{layer}}.{name}.weight", (f"{_LAYER}.{name}.weight",))
            for name in LAYER_MODULES
            if not name.endswith("norm")
        ),
        *with_bias("{final}", "transformer.ln_f"),
    ),
    head=HEAD,
    # `auto_map` names the model's own Python files in older folders. transformers has its own code for
    # the model.
    ignored=("auto_map",),
    buffers=(f"{_LAYER}.self_attention.rotary_emb.inv_freq",),
)
