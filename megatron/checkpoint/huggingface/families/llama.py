"""Llama 1 to 3, and what its relatives share: rotary positions, RMS norms, SwiGLU, grouped queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.family import (
    LM_HEAD,
    WORD_EMBEDDINGS,
    Conversion,
    Family,
    Parameter,
    Transform,
)
from megatron.checkpoint.huggingface.rope import ROPE
from megatron.config import ModelConfig
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _split_heads(rows: Tensor, model: ModelConfig) -> list[Tensor]:
    """Rows ordered (groups, heads per group + 2, head_dim) -> those of all queries, keys, values."""
    shared = model.num_attention_heads // model.query_groups
    grouped = rows.unflatten(0, (model.query_groups, shared + 2, -1))
    return [part.flatten(0, 2) for part in grouped.split((shared, 1, 1), dim=1)]


def _join_heads(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """The inverse of `_split_heads`."""
    groups = model.query_groups
    grouped = [part.unflatten(0, (groups, -1, model.kv_channels)) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 2)


HEADS = Transform(_split_heads, _join_heads, slice_dim=0, of_groups=True)
# Megatron has (value, gate); Hugging Face has the gate and the value ("up").
GATE = Transform(
    lambda x, model: x.chunk(2)[::-1], lambda parts, model: torch.cat(list(parts)[::-1]), slice_dim=0
)


def _megatron_groups(hf_config: PreTrainedConfig) -> dict[str, Any]:
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if type(heads) is not int or type(groups) is not int or groups < 1 or heads % groups:
        raise UserError(
            f"the model has num_key_value_heads = {one_line(groups)} and num_attention_heads = "
            f"{one_line(heads)}: expected a multiple of the former"
        )
    return {} if groups == heads else {"group_query_attention": True, "num_query_groups": groups}


QUERY_GROUPS = Conversion(
    megatron=("group_query_attention", "num_query_groups"),
    hf=("num_key_value_heads",),
    to_hf=lambda model: {"num_key_value_heads": model.query_groups},
    to_megatron=_megatron_groups,
)
UNTIED = Conversion(
    megatron=("untie_embeddings_and_output_weights",),
    hf=("tie_word_embeddings",),
    to_hf=lambda model: {"tie_word_embeddings": not model.untie_embeddings_and_output_weights},
    to_megatron=lambda hf_config: {"untie_embeddings_and_output_weights": not hf_config.tie_word_embeddings},
)
CONVERSIONS = (QUERY_GROUPS, UNTIED, ROPE)

FIELDS = (
    ("num_layers", "num_hidden_layers"),
    ("hidden_size", "hidden_size"),
    ("ffn_hidden_size", "intermediate_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("layernorm_epsilon", "rms_norm_eps"),
    ("vocab_size", "vocab_size"),
    ("max_position_embeddings", "max_position_embeddings"),
)
HEAD_DIM = ("kv_channels", "head_dim")
TRAINING_FIELDS = (("init_method_std", "initializer_range"), ("attention_dropout", "attention_dropout"))
CONSTANTS = {
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "disable_bias_linear": True,
}
TRAINING = {"hidden_dropout": 0.0}
ATTENTION = "model.layers.{block}.self_attn"
PARAMETERS = (
    Parameter(WORD_EMBEDDINGS, ("model.embed_tokens.weight",)),
    Parameter("{layer}.input_layernorm.weight", ("model.layers.{block}.input_layernorm.weight",)),
    Parameter(
        "{layer}.self_attention.query_key_value.weight",
        tuple(f"{ATTENTION}.{part}_proj.weight" for part in "qkv"),
        HEADS,
    ),
    Parameter("{layer}.self_attention.dense.weight", (f"{ATTENTION}.o_proj.weight",)),
    Parameter(
        "{layer}.post_attention_layernorm.weight", ("model.layers.{block}.post_attention_layernorm.weight",)
    ),
    Parameter(
        "{layer}.mlp.dense_h_to_4h.weight",
        ("model.layers.{block}.mlp.gate_proj.weight", "model.layers.{block}.mlp.up_proj.weight"),
        GATE,
    ),
    Parameter("{layer}.mlp.dense_4h_to_h.weight", ("model.layers.{block}.mlp.down_proj.weight",)),
    Parameter("{final}.weight", ("model.norm.weight",)),
)
HEAD = Parameter("{head}.lm_head.weight", (LM_HEAD,))
BUFFERS = (f"{ATTENTION}.rotary_emb.inv_freq",)

LLAMA = Family(
    title="Llama",
    architecture="LlamaForCausalLM",
    fields=(*FIELDS, HEAD_DIM),
    training_fields=TRAINING_FIELDS,
    megatron_constants=CONSTANTS,
    megatron_training=TRAINING,
    hf_constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    conversions=CONVERSIONS,
    parameters=PARAMETERS,
    head=HEAD,
    buffers=BUFFERS,
    prefix="model.",
    # Slices of the matrix products of one training layout; older versions of transformers used them.
    ignored=("pretraining_tp",),
)
