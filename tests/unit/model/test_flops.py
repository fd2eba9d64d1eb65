"""FLOPs against published measurements: the peers printed TFLOP/s beside seconds per iteration."""

import sys

import pytest

from megatron.config import ModelConfig
from megatron.model.flops import (
    iteration_flops,
    model_iteration_flops,
    tflops_per_device,
)

# Source (train/tr11-176B-ml/chronicles-prequel.md of bigscience-workshop/bigscience), layers, hidden size,
# batch, seconds per iteration, TFLOP/s per GPU.
# All have sequence 2048, vocabulary 250880, 384 GPUs and full recomputation.
PUBLISHED = [
    ("line 608", 72, 14336, 2048, 134.02, 120.29),
    ("line 687", 96, 12288, 2048, 122.96, 128.69),
    ("line 695", 84, 13312, 2048, 125.52, 129.29),
    ("line 778", 72, 14336, 1568, 92.75, 133.08),
    ("line 789", 72, 14336, 2016, 125.52, 126.43),
    ("line 801", 72, 14336, 2048, 110.48, 145.92),
    ("line 870", 78, 13824, 2048, 107.12, 151.64),
    ("line 909", 106, 12288, 2048, 120.34, 145.01),
    ("176B run, iteration 12695", 70, 14336, 2048, 105.22, 149.02),
]


@pytest.mark.parametrize(("source", "layers", "hidden", "batch", "seconds", "tflops"), PUBLISHED)
def test_published_throughput_follows_from_its_seconds(source, layers, hidden, batch, seconds, tflops):
    flops = iteration_flops(
        num_layers=layers,
        hidden_size=hidden,
        seq_length=2048,
        padded_vocab_size=250880,
        batch_size=batch,
        recompute=True,
    )
    assert tflops_per_device(flops, seconds, 384) == pytest.approx(tflops, rel=1e-3)


SMALL = {"num_layers": 4, "hidden_size": 256, "seq_length": 512, "padded_vocab_size": 8192, "batch_size": 8}


def test_flops_equal_a_count_matrix_by_matrix():
    tokens, layers, h, s, v = 8 * 512, 4, 256, 512, 8192
    matrices = 3 * h * h + h * h + 2 * 4 * h * h  # multiply-adds per token: qkv, projection, the MLP's two
    attention = 2 * s * h  # scores and weighted values
    passes, head_passes = 4, 3  # the head is never computed again
    flops = 2 * tokens * (passes * layers * (matrices + attention) + head_passes * v * h)
    assert iteration_flops(**SMALL, recompute=True) == pytest.approx(flops)


def test_recomputation_costs_one_more_forward_pass():
    without = iteration_flops(**SMALL, recompute=False)
    assert iteration_flops(**SMALL, recompute=True) == pytest.approx(without * 4 / 3)


def test_a_gated_mlp_counts_32_for_24():
    plain, gated = (iteration_flops(**SMALL, recompute=False, gated_mlp=gated) for gated in (False, True))
    assert gated / plain == pytest.approx(32 / 24)


def test_flops_need_no_torch():
    assert "torch" not in sys.modules["megatron.model.flops"].__dict__


def test_a_step_of_llama_3_8b_has_six_flops_per_matrix_element_and_token_and_those_of_the_scores():
    model = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        seq_length=8192,
        position_embedding_type="rotary",
        glu_activation="swiglu",
    )
    step = {"seq_length": 8192, "padded_vocab_size": 128256, "batch_size": 2, "recompute_attention": False}
    flops = model_iteration_flops(model, recompute=False, **step)
    # 8.03 B parameters without the embedding (a look-up) and the norms.
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    tokens = 2 * 8192
    assert flops == pytest.approx(6 * tokens * matrices + 12 * tokens * 8192 * 32 * 4096)
    recomputed = model_iteration_flops(model, recompute=True, **step)
    assert recomputed - flops == pytest.approx((flops - 6 * tokens * 128256 * 4096) / 3)


def test_a_layer_with_a_wide_mlp_of_4h_has_the_published_count():
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, position_embedding_type="alibi"
    )
    shape = {
        "seq_length": 32,
        "padded_vocab_size": 128,
        "batch_size": 4,
        "recompute": True,
        "recompute_attention": False,
    }
    assert model_iteration_flops(model, **shape) == iteration_flops(num_layers=2, hidden_size=64, **shape)
