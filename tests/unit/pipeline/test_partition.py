"""Where the list of layers is cut."""

import pytest

from megatron.config import ConfigError
from megatron.pipeline.partition import stage_bounds

LAYER = "ParallelTransformerLayerPipe"


def names(layers, casts=False):
    ends = ["to_batch_first", "MixedFusedLayerNorm", "EmbeddingPipe"] + ["float16_to_fp32"] * casts
    return ["_to_float16", "EmbeddingPipe", "to_sequence_first", *[LAYER] * layers, *ends]


def parameters(layers):
    return [0, 100, 0, *[40] * layers, 0, 2, 100]


def test_bloom_is_cut_as_it_was_trained():
    """BLOOM's run: embedding and 5 layers, ten times 6, 5 and the head."""
    bounds = stage_bounds("type:transformer|embedding", names(70, casts=True), [], 12)
    assert bounds == [0, 8, *range(14, 69, 6), 77]


def test_transformer_layers_are_shared_out_evenly():
    bounds = stage_bounds("type:transformer", names(8), [], 4)
    assert bounds == [0, 5, 7, 9, 14]


def test_parameters_weigh_the_layers():
    bounds = stage_bounds("parameters", names(4), parameters(4), 2)
    halves = [sum(parameters(4)[first:last]) for first, last in zip(bounds, bounds[1:], strict=False)]
    assert max(halves) == min(max(sum(parameters(4)[:cut]), sum(parameters(4)[cut:])) for cut in range(1, 10))


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("casts", [False, True])
def test_neither_tokens_nor_logits_travel_between_stages(stages, casts):
    """Tokens have no gradient and logits differ between tensor ranks: the ends stay with the embeddings."""
    listed = names(4, casts)
    try:
        bounds = stage_bounds("uniform", listed, [], stages)
    except ConfigError:
        assert stages >= 7  # the ends take two entries each, so some stage is left without any
        return
    assert bounds[1] >= 2
    assert bounds[-2] <= len(listed) - 1 - casts
    assert all(first < last for first, last in zip(bounds, bounds[1:], strict=False))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("type:mlp", ["mlp", LAYER, "EmbeddingPipe"]),
        ("type:(", ["regular expression"]),
        ("best", ["best", "uniform", "parameters", "type:REGEX"]),
    ],
)
def test_a_method_that_cannot_be_used_is_named_with_what_there_is(method, words):
    with pytest.raises(ConfigError) as caught:
        stage_bounds(method, names(4), parameters(4), 2)
    assert all(word in str(caught.value) for word in [method, *words])


def test_an_empty_stage_is_refused():
    with pytest.raises(ConfigError, match="leaves stage 0 of 8 without a layer|stage 1 of 8 without"):
        stage_bounds("uniform", names(2), [], 8)
