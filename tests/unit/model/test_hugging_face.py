"""Equal weights give the logits of Hugging Face's BLOOM and GPT-2."""

import pytest
import torch

from tests.support.layouts import SEQ, VOCAB, Row
from tests.support.pool import run_world
from tests.unit.model.single_process import random_tokens, random_weights_and_logits

LAYERS, HIDDEN = 4, 48
TOKENS = random_tokens(2, SEQ)
EMBED = "tied_modules.embed"


def ours(positions, heads, **model):
    """Returns (weights without the vocabulary's padding, logits)."""
    changes = {"model": {"hidden_size": HIDDEN, "ffn_hidden_size": 4 * HIDDEN, "num_attention_heads": heads}}
    changes["model"] |= {"kv_channels": HIDDEN // heads, **model}
    row = Row(positions=positions)
    ((weights, logits),) = run_world(1, random_weights_and_logits, row, TOKENS, changes)
    word_embeddings = f"{EMBED}.word_embeddings.weight"
    weights[word_embeddings] = weights[word_embeddings][:VOCAB]
    return weights, logits


@torch.no_grad()
def assert_same_logits(theirs, state, expected):
    unused = theirs.load_state_dict(state, strict=False)
    # The head is the embedding, so a state dict may not contain it.
    assert not unused.unexpected_keys and set(unused.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()
    logits = theirs.eval()(TOKENS).logits
    assert logits.std() > 0.1, "logits without spread would show nothing"
    torch.testing.assert_close(expected, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_with_embed_layernorm_is_hugging_faces_bloom(heads):
    from transformers import BloomConfig, BloomForCausalLM

    weights, logits = ours("alibi", heads, embed_layernorm=True)
    state = {
        "transformer.word_embeddings.weight": weights[f"{EMBED}.word_embeddings.weight"],
        "transformer.word_embeddings_layernorm.weight": weights[f"{EMBED}.word_embeddings.norm.weight"],
        "transformer.word_embeddings_layernorm.bias": weights[f"{EMBED}.word_embeddings.norm.bias"],
        "transformer.ln_f.weight": weights[f"{LAYERS + 4}.weight"],
        "transformer.ln_f.bias": weights[f"{LAYERS + 4}.bias"],
    }
    for name, weight in weights.items():
        index, _, rest = name.partition(".")
        if rest not in ("weight", "bias") and index.isdigit():
            state[f"transformer.h.{int(index) - 3}.{rest}"] = weight
    config = BloomConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        n_layer=LAYERS,
        n_head=heads,
        layer_norm_epsilon=1e-5,
        apply_residual_connection_post_layernorm=False,
    )
    assert_same_logits(BloomForCausalLM(config), state, logits)


def test_absolute_positions_are_hugging_faces_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    heads = 4
    weights, logits = ours("absolute", heads)
    state = {
        "transformer.wte.weight": weights[f"{EMBED}.word_embeddings.weight"],
        "transformer.wpe.weight": weights[f"{EMBED}.position_embeddings.weight"],
        "transformer.ln_f.weight": weights[f"{LAYERS + 4}.weight"],
        "transformer.ln_f.bias": weights[f"{LAYERS + 4}.bias"],
    }
    theirs_by_ours = {
        "input_layernorm": "ln_1",
        "self_attention.query_key_value": "attn.c_attn",
        "self_attention.dense": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.dense_h_to_4h": "mlp.c_fc",
        "mlp.dense_4h_to_h": "mlp.c_proj",
    }
    for layer in range(LAYERS):
        for our_name, their_name in theirs_by_ours.items():
            for kind in ("weight", "bias"):
                weight = weights[f"{layer + 3}.{our_name}.{kind}"]
                if "query_key_value" in our_name:
                    # (heads, 3, head_dim) rows -> (3, heads, head_dim)
                    shape = (heads, 3, HIDDEN // heads, -1)
                    weight = weight.view(shape).transpose(0, 1).reshape(weight.shape)
                if weight.dim() == 2:
                    weight = weight.t()  # their Conv1D holds [inputs, outputs]
                state[f"transformer.h.{layer}.{their_name}.{kind}"] = weight.contiguous()
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=SEQ,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=heads,
        layer_norm_epsilon=1e-5,
    )
    assert_same_logits(GPT2LMHeadModel(config), state, logits)
