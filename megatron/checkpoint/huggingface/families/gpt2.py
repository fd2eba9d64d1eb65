"""GPT-2: learned absolute positions."""

from torch import Tensor

from megatron.checkpoint.huggingface.family import Family, Parameter, one_to_one, with_bias
from megatron.config import ModelConfig
from megatron.model.layer_list import EMBEDDING, WORD_EMBEDDINGS


def _heads_last(rows: Tensor, model: ModelConfig) -> Tensor:
    """Returns rows with their order changed from (heads, 3, head_dim) to (3, heads, head_dim)."""
    return rows.unflatten(0, (model.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _heads_first(rows: Tensor, model: ModelConfig) -> Tensor:
    """Returns rows with their order changed from (3, heads, head_dim) to (heads, 3, head_dim)."""
    return rows.unflatten(0, (3, model.num_attention_heads, -1)).transpose(0, 1).flatten(0, 2)


# GPT-2's linear layers are `Conv1D`, whose weight is [inputs, outputs].
TRANSPOSED = one_to_one(lambda x, model: x.t(), lambda x, model: x.t())
HEADS_LAST = one_to_one(_heads_last, _heads_first)
HEADS_LAST_TRANSPOSED = one_to_one(
    lambda x, model: _heads_last(x, model).t(), lambda x, model: _heads_first(x.t(), model)
)

GPT2 = Family(
    title="GPT-2",
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
    megatron_constants={"position_embedding_type": "absolute", "embed_layernorm": False},
    hf_constants={
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    parameters=(
        Parameter(WORD_EMBEDDINGS, ("transformer.wte.weight",)),
        Parameter(f"{EMBEDDING}position_embeddings.weight", ("transformer.wpe.weight",)),
        *with_bias("{layer}.input_layernorm", "transformer.h.{block}.ln_1"),
        *with_bias(
            "{layer}.self_attention.query_key_value",
            "transformer.h.{block}.attn.c_attn",
            HEADS_LAST_TRANSPOSED,
            HEADS_LAST,
        ),
        *with_bias("{layer}.self_attention.dense", "transformer.h.{block}.attn.c_proj", TRANSPOSED),
        *with_bias("{layer}.post_attention_layernorm", "transformer.h.{block}.ln_2"),
        *with_bias("{layer}.mlp.dense_h_to_4h", "transformer.h.{block}.mlp.c_fc", TRANSPOSED),
        *with_bias("{layer}.mlp.dense_4h_to_h", "transformer.h.{block}.mlp.c_proj", TRANSPOSED),
        *with_bias("{final}", "transformer.ln_f"),
    ),
    # Settings of heads for other tasks, a copy of n_positions, and the order of scaling and rounding.
    ignored=(
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
        *("summary_use_proj", "task_specific_params", "n_ctx", "reorder_and_upcast_attn"),
    ),
    # The causal mask, and the score that masked positions get.
    buffers=("transformer.h.{block}.attn.bias", "transformer.h.{block}.attn.masked_bias"),
)
