"""BLOOM: ALiBi, and a norm after the word embeddings."""

from megatron.checkpoint.huggingface.family import (
    Family,
    Parameter,
    equal_heads,
    layers_of_megatron,
    with_bias,
)
from megatron.model.layer_list import EMBEDDING, WORD_EMBEDDINGS

BLOOM = Family(
    title="BLOOM",
    architecture="BloomForCausalLM",
    fields=(
        ("num_layers", "n_layer"),
        ("hidden_size", "hidden_size"),
        ("num_attention_heads", "n_head"),
        ("layernorm_epsilon", "layer_norm_epsilon"),
        ("vocab_size", "vocab_size"),
        # BloomConfig lacks this setting, but BLOOM's own config.json has it.
        ("seq_length", "seq_length"),
        ("apply_residual_connection_post_layernorm", "apply_residual_connection_post_layernorm"),
    ),
    megatron_constants={"position_embedding_type": "alibi", "embed_layernorm": True},
    megatron_derived={"ffn_hidden_size": lambda model: 4 * model.hidden_size, "kv_channels": equal_heads},
    # BLOOM accepts sequences of any length. It was trained on this length, which only its own config.json
    # has.
    default_seq_length=2048,
    # slow_but_exact sums products in slices, to reproduce the rounding of one training layout.
    hf_constants={"tie_word_embeddings": True, "slow_but_exact": False},
    parameters=(
        Parameter(WORD_EMBEDDINGS, ("transformer.word_embeddings.weight",)),
        *with_bias(f"{EMBEDDING}word_embeddings.norm", "transformer.word_embeddings_layernorm"),
        *layers_of_megatron("transformer.h.{block}"),
        *with_bias("{final}", "transformer.ln_f"),
    ),
    # Settings of the program that trained BLOOM, and n_embed, an old name of hidden_size.
    ignored=(
        *("n_embed", "n_inner", "offset_alibi", "pretraining_tp", "skip_bias_add", "skip_bias_add_qkv"),
        *("masked_softmax_fusion", "bias_dropout_fusion", "attention_softmax_in_fp32", "unk_token_id"),
    ),
    buffers=("transformer.h.{block}.self_attention.scale_mask_softmax.causal_mask",),
)
