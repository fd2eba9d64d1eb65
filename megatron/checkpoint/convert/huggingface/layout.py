"""How our models map to Hugging Face's: BLOOM for ALiBi with an embedding norm, GPT-2 for absolute
positions.

A `Family` is a table of corresponding settings and parameters. `exporter` uses it to write a folder from a
checkpoint, and `importer` to write a checkpoint from a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.model.gpt_model import FIRST_TRANSFORMER_LAYER


@dataclass(frozen=True)
class Transform:
    """Conversion of one tensor in both directions; both functions take the tensor and the number of heads."""

    to_theirs: Callable[[Tensor, int], Tensor]
    to_ours: Callable[[Tensor, int], Tensor]


def _heads_last(rows: Tensor, heads: int) -> Tensor:
    """Rows ordered (heads, 3, head_dim) -> (3, heads, head_dim)."""
    return rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _heads_first(rows: Tensor, heads: int) -> Tensor:
    """Rows ordered (3, heads, head_dim) -> (heads, 3, head_dim)."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


SAME = Transform(lambda x, heads: x, lambda x, heads: x)
# GPT-2's linear layers are `Conv1D`, which holds [inputs, outputs].
TRANSPOSED = Transform(lambda x, heads: x.t(), lambda x, heads: x.t())
REORDERED = Transform(_heads_last, _heads_first)
REORDERED_TRANSPOSED = Transform(
    lambda x, heads: _heads_last(x, heads).t(), lambda x, heads: _heads_first(x.t(), heads)
)


@dataclass(frozen=True)
class Parameter:
    """A parameter's two names. In ours `{layer}` is a transformer layer's index in the pipeline's list and
    `{final}` that of the final norm; in theirs `{block}` counts transformer layers from 0."""

    ours: str
    theirs: str
    transform: Transform = SAME


def _with_bias(
    ours: str, theirs: str, weight: Transform = SAME, bias: Transform = SAME
) -> tuple[Parameter, Parameter]:
    return (
        Parameter(f"{ours}.weight", f"{theirs}.weight", weight),
        Parameter(f"{ours}.bias", f"{theirs}.bias", bias),
    )


@dataclass(frozen=True)
class Family:
    """The mapping of one Hugging Face model type.

    fields: (field of ModelConfig, their setting). training_fields: the same for settings that only affect
    training; if two map to one field, the first is read. our_constants, their_constants: values that every
    model of the family has. buffers: names in their files that are not weights and are ignored.
    """

    architecture: str
    fields: tuple[tuple[str, str], ...]
    training_fields: tuple[tuple[str, str], ...]
    our_constants: Mapping[str, Any]
    their_constants: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    buffers: tuple[str, ...]

    def names(self, num_layers: int) -> Iterator[Parameter]:
        """The parameters of a model with `num_layers` layers, with the layer numbers filled in."""
        final = FIRST_TRANSFORMER_LAYER + num_layers + 1
        for parameter in self.parameters:
            blocks = range(num_layers) if "{layer}" in parameter.ours else (0,)
            for block in blocks:
                layer = FIRST_TRANSFORMER_LAYER + block
                yield Parameter(
                    parameter.ours.format(layer=layer, final=final),
                    parameter.theirs.format(block=block),
                    parameter.transform,
                )

    def buffer_names(self, num_layers: int) -> set[str]:
        """The names of the buffers of a model with `num_layers` layers."""
        return {name.format(block=block) for name in self.buffers for block in range(num_layers)}


_EMBED = "tied_modules.embed"
WORD_EMBEDDINGS = f"{_EMBED}.word_embeddings.weight"
"""Our name of the word embeddings, which are tied to the LM head."""

PREFIX = "transformer."
"""Prefix of their names. The public files of both families were saved without the head and lack it."""

LM_HEAD = "lm_head.weight"
"""Their name of the tied LM head, which some files contain as well."""

FAMILIES = {
    "bloom": Family(
        architecture="BloomForCausalLM",
        fields=(
            ("num_layers", "n_layer"),
            ("hidden_size", "hidden_size"),
            ("num_attention_heads", "n_head"),
            ("layernorm_epsilon", "layer_norm_epsilon"),
            ("vocab_size", "vocab_size"),
            # Not a setting of BloomConfig, but BLOOM's own config.json has it.
            ("seq_length", "seq_length"),
            ("apply_residual_connection_post_layernorm", "apply_residual_connection_post_layernorm"),
        ),
        training_fields=(
            ("init_method_std", "initializer_range"),
            ("hidden_dropout", "hidden_dropout"),
            ("attention_dropout", "attention_dropout"),
        ),
        our_constants={"position_embedding_type": "alibi", "embed_layernorm": True},
        # slow_but_exact sums products in slices, to round as one training layout did. Ours does not.
        their_constants={"tie_word_embeddings": True, "slow_but_exact": False},
        parameters=(
            Parameter(WORD_EMBEDDINGS, "transformer.word_embeddings.weight"),
            *_with_bias(f"{_EMBED}.word_embeddings.norm", "transformer.word_embeddings_layernorm"),
            *_with_bias("{layer}.input_layernorm", "transformer.h.{block}.input_layernorm"),
            *_with_bias(
                "{layer}.self_attention.query_key_value",
                "transformer.h.{block}.self_attention.query_key_value",
            ),
            *_with_bias("{layer}.self_attention.dense", "transformer.h.{block}.self_attention.dense"),
            *_with_bias("{layer}.post_attention_layernorm", "transformer.h.{block}.post_attention_layernorm"),
            *_with_bias("{layer}.mlp.dense_h_to_4h", "transformer.h.{block}.mlp.dense_h_to_4h"),
            *_with_bias("{layer}.mlp.dense_4h_to_h", "transformer.h.{block}.mlp.dense_4h_to_h"),
            *_with_bias("{final}", "transformer.ln_f"),
        ),
        buffers=("transformer.h.{block}.self_attention.scale_mask_softmax.causal_mask",),
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        fields=(
            ("num_layers", "n_layer"),
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
            ("layernorm_epsilon", "layer_norm_epsilon"),
            ("vocab_size", "vocab_size"),
            ("max_position_embeddings", "n_positions"),
            ("ffn_hidden_size", "n_inner"),
        ),
        training_fields=(
            ("init_method_std", "initializer_range"),
            ("hidden_dropout", "resid_pdrop"),
            ("hidden_dropout", "embd_pdrop"),
            ("attention_dropout", "attn_pdrop"),
        ),
        our_constants={"position_embedding_type": "absolute", "embed_layernorm": False},
        their_constants={
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        parameters=(
            Parameter(WORD_EMBEDDINGS, "transformer.wte.weight"),
            Parameter(f"{_EMBED}.position_embeddings.weight", "transformer.wpe.weight"),
            *_with_bias("{layer}.input_layernorm", "transformer.h.{block}.ln_1"),
            *_with_bias(
                "{layer}.self_attention.query_key_value",
                "transformer.h.{block}.attn.c_attn",
                REORDERED_TRANSPOSED,
                REORDERED,
            ),
            *_with_bias("{layer}.self_attention.dense", "transformer.h.{block}.attn.c_proj", TRANSPOSED),
            *_with_bias("{layer}.post_attention_layernorm", "transformer.h.{block}.ln_2"),
            *_with_bias("{layer}.mlp.dense_h_to_4h", "transformer.h.{block}.mlp.c_fc", TRANSPOSED),
            *_with_bias("{layer}.mlp.dense_4h_to_h", "transformer.h.{block}.mlp.c_proj", TRANSPOSED),
            *_with_bias("{final}", "transformer.ln_f"),
        ),
        # The causal mask, and the score of masked positions.
        buffers=("transformer.h.{block}.attn.bias", "transformer.h.{block}.attn.masked_bias"),
    ),
}
