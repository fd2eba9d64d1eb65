"""Tests positions, ALiBi's slopes and documents within a sample."""

import gc
import math
import weakref

import pytest
import torch

from megatron.model.position import (
    AttentionMasks,
    RotaryEmbedding,
    alibi_slopes,
    document_ids_of,
    positions_within_documents,
)
from tests.support.layouts import EOD, Row, config_of
from tests.support.pool import run_world
from tests.unit.model.single_process import (
    logits,
    model_with_weights,
    random_tokens,
    random_weights,
)

ROTARY_DIM = 8


def test_the_end_token_belongs_to_the_document_that_it_ends():
    tokens = torch.tensor([[5, 6, EOD, 7, EOD, EOD, 8, 9], [EOD, 1, 2, 3, 4, 5, 6, EOD]])
    document_ids = document_ids_of(tokens, EOD)
    assert document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1]]
    positions = positions_within_documents(document_ids)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]


def test_a_sample_without_an_end_token_is_one_document():
    document_ids = document_ids_of(random_tokens(3, 10), EOD)
    assert not document_ids.any()
    assert positions_within_documents(document_ids).tolist() == [list(range(10))] * 3


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 64])
def test_alibi_slopes_of_a_power_of_two_are_a_geometric_sequence_to_2_to_the_minus_8(heads):
    slopes = alibi_slopes(heads)
    assert slopes[-1] == 2.0**-8 and slopes[0] == pytest.approx(2 ** (-8 / heads))
    ratios = [b / a for a, b in zip(slopes, slopes[1:], strict=False)]
    assert ratios == pytest.approx([slopes[0]] * (heads - 1))


def test_alibi_slopes_of_112_heads_have_64_of_them_and_48_of_128():
    slopes = alibi_slopes(112)
    assert len(slopes) == len(set(slopes)) == 112
    assert slopes[:64] == pytest.approx([2 ** (-8 * i / 64) for i in range(1, 65)])
    assert slopes[64:] == pytest.approx([2 ** (-8 * i / 128) for i in range(1, 97, 2)])


def test_the_causal_bias_of_alibi_grows_with_the_distance():
    masks = AttentionMasks([0.5, 0.25], within_documents=False)
    bias = masks.bias(4, torch.float32, torch.device("cpu"), None)
    assert bias.shape == (1, 2, 4, 4)
    assert bias[0, 0, 3].tolist() == [-1.5, -1.0, -0.5, 0.0]
    assert bias[0, 1, 1].tolist() == [-0.25, 0.0, -math.inf, -math.inf]


def test_plain_causal_attention_needs_no_bias():
    masks = AttentionMasks(None, within_documents=False)
    assert masks.bias(4, torch.float32, torch.device("cpu"), None) is None


def test_document_boundaries_without_document_ids_are_an_error():
    with pytest.raises(ValueError, match="no document_ids"):
        AttentionMasks(None, within_documents=True).bias(4, torch.float32, torch.device("cpu"), None)


def test_all_layers_share_one_bias_that_is_freed_with_its_document_ids():
    masks = AttentionMasks([0.5], within_documents=True)
    document_ids, others = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1]])

    def bias(of, dtype=torch.float32):
        return masks.bias(4, dtype, torch.device("cpu"), of)

    first = bias(document_ids)
    assert bias(document_ids) is first and first.is_contiguous()
    assert not torch.equal(bias(others), first)
    assert torch.equal(bias(document_ids), first)
    assert bias(document_ids, torch.bfloat16).dtype == torch.bfloat16
    kept = weakref.ref(bias(document_ids))
    del document_ids
    gc.collect()
    assert kept() is None


def rotary_embedding(**model):
    return RotaryEmbedding(
        config_of(Row(positions="rotary"), model={"kv_channels": ROTARY_DIM, **model}).model
    )


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"rotary_interleaved": True},
        {"rotary_percent": 0.5, "rotary_base": 500.0},
        {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
    ],
)
def test_rotary_scores_depend_on_the_distance_only(model):
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(ROTARY_DIM, generator=generator) for _ in range(2))
    rotary = rotary_embedding(**model)
    seq = 12
    q, k = rotary.rotate(query.expand(seq, 1, 1, -1), key.expand(seq, 1, 1, -1), None)
    scores = q[:, 0, 0] @ k[:, 0, 0].T
    for distance in range(seq):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert scores.diagonal().std() < 1e-4 < scores[-1].std()
    torch.testing.assert_close(scores[0, 0], query @ key)


def test_the_rest_of_a_partly_rotated_head_stays_as_it_is():
    x = torch.randn(6, 1, 1, ROTARY_DIM, generator=torch.Generator().manual_seed(2))
    rotated, _ = rotary_embedding(rotary_percent=0.25).rotate(x, x, None)
    kept = ROTARY_DIM // 4
    assert torch.equal(rotated[..., kept:], x[..., kept:])
    assert (rotated[1:, ..., :kept] - x[1:, ..., :kept]).abs().max() > 1e-2


def test_interleaved_pairs_are_neighbors():
    """The formula of the paper, with complex numbers, is the reference."""
    x = torch.randn(6, 1, 1, ROTARY_DIM, generator=torch.Generator().manual_seed(2))
    rotated, _ = rotary_embedding(rotary_interleaved=True).rotate(x, x, None)
    angle = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)
    turns = torch.polar(torch.ones_like(angle), angle)[:, None, None]
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)
    torch.testing.assert_close(rotated, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [{}, {"rotary_interleaved": True}, {"rotary_percent": 0.5}])
def test_a_rotation_of_16_bit_heads_is_rounded_once(model, dtype):
    """Covers the forward and backward pass, at positions at which rounded angles would be wrong."""
    x, grad = torch.randn(2, 6, 1, 1, ROTARY_DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
    positions = torch.tensor([[0, 1, 2, 1001, 30001, 130001]])
    results = []
    for heads in (x, x.float()):
        heads = heads.clone().requires_grad_()
        rotated, _ = rotary_embedding(**model).rotate(heads, heads, positions)
        results.append((rotated, *torch.autograd.grad(rotated, heads, grad.to(heads.dtype))))
    for found, in_fp32 in zip(*results, strict=True):
        assert found.dtype == dtype and torch.equal(found, in_fp32.to(dtype))


# Hugging Face's settings for each scaling, with factor 4 and an original context of 32 tokens.
SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0},
    "yarn": {"factor": 4.0, "beta_slow": 0.5, "beta_fast": 3.0},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = SCALINGS[name]
    ours = {f"rope_{key}": value for key, value in theirs.items() if key != "factor"}
    ours |= {} if name == "linear" else {"rope_original_max_position_embeddings": 32}
    rotary = rotary_embedding(
        rope_scaling_type=name, rope_scaling_factor=theirs["factor"], rotary_base=100.0, **ours
    )
    config = LlamaConfig(
        hidden_size=4 * ROTARY_DIM,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": name,
            "rope_theta": 100.0,
            "original_max_position_embeddings": 32,
            **theirs,
        },
    )
    frequencies, multiplier = ROPE_INIT_FUNCTIONS[name](config, "cpu")
    torch.testing.assert_close(rotary.inverse_frequency, frequencies)
    assert rotary.multiplier == pytest.approx(multiplier)
    plain = rotary_embedding(rotary_base=100.0).inverse_frequency
    if name != "linear":
        assert rotary.inverse_frequency[0] == plain[0], "the highest frequency stays"
    torch.testing.assert_close(rotary.inverse_frequency[-1], plain[-1] / 4.0)


def test_rotary_positions_that_are_given_are_used():
    rotary = rotary_embedding()
    x = torch.randn(6, 1, 1, ROTARY_DIM, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    restarted, _ = rotary.rotate(x, x, positions)
    first, second = (rotary.rotate(part, part, None)[0] for part in x.split(3))
    torch.testing.assert_close(restarted, torch.cat((first, second)))


# --- packed documents through the whole model ---


def packed_and_alone(row, data, lengths):
    """Returns the logits of documents packed into one sample, and of each document alone."""
    weights = random_weights(row)
    documents = [random_tokens(1, length, seed) for seed, length in enumerate(lengths)]
    for document in documents[:-1]:
        document[0, -1] = EOD
    packed_model = model_with_weights(row, weights, data=data)
    plain_model = model_with_weights(row, weights)
    packed = logits(packed_model, torch.cat(documents, dim=1))
    return packed, torch.cat([logits(plain_model, document) for document in documents], dim=1)


BOTH = {"reset_attention_mask": True, "reset_position_ids": True}
MASK_ONLY = {"reset_attention_mask": True}


@pytest.mark.parametrize(
    "positions, data",
    # Rotary embeddings and ALiBi depend only on distances, so the mask alone separates the documents.
    [("absolute", BOTH), ("rotary", BOTH), ("rotary", MASK_ONLY), ("alibi", BOTH), ("alibi", MASK_ONLY)],
)
def test_a_packed_document_has_the_logits_that_it_has_alone(positions, data):
    ((packed, alone),) = run_world(1, packed_and_alone, Row(positions=positions), data, [9, 1, 14, 8])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["absolute", "rotary", "alibi"])
@pytest.mark.parametrize("data", [{}, {"reset_position_ids": True}])
def test_without_the_mask_a_document_sees_the_one_before(positions, data):
    ((packed, alone),) = run_world(1, packed_and_alone, Row(positions=positions), data, [9, 23])
    torch.testing.assert_close(packed[:, :9], alone[:, :9], rtol=1e-4, atol=1e-5)
    assert (packed[:, 9:] - alone[:, 9:]).abs().max() > 1e-2


def test_a_mask_without_restarted_positions_leaves_absolute_positions_running():
    ((packed, alone),) = run_world(1, packed_and_alone, Row(), MASK_ONLY, [9, 23])
    assert (packed[:, 9:] - alone[:, 9:]).abs().max() > 1e-2


def future_and_past(row):
    """Returns the logits of a sample, and of a copy with different tokens in its second half."""
    model = model_with_weights(row, random_weights(row))
    tokens, others = random_tokens(2, 32), random_tokens(2, 32, seed=6)
    return logits(model, tokens), logits(model, torch.cat((tokens[:, :16], others[:, 16:]), dim=1))


@pytest.mark.parametrize("positions", ["absolute", "rotary", "alibi"])
def test_no_token_sees_the_future(positions):
    ((first, second),) = run_world(1, future_and_past, Row(positions=positions))
    torch.testing.assert_close(first[:, :16], second[:, :16], rtol=0, atol=0)
    assert (first[:, 16:] - second[:, 16:]).abs().max() > 1e-2
