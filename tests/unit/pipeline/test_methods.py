"""Tests the partition of the layer list by every method."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from megatron.config import ConfigError
from megatron.pipeline.methods import LayerTable, MemoryCosts, PipelineShape, partition_layers
from megatron.pipeline.partition_method import parse_partition_method
from tests.support.layer_lists import LAYER, layer_list


def table(layers, casts=False, seconds=None, in_flight=()):
    """Returns a table of costs. Embedding and head have 100 parameters, a layer 40. The head costs as much as
    two layers."""

    def column(embedding, layer, norm, head):
        inner = [0, embedding, 0, *[layer] * layers, 0, norm, head]
        return inner + [0] * casts

    return LayerTable(
        layer_list(layers, casts),
        parameters=column(100, 40, 2, 100),
        flops=column(0, 1e9, 0, 2e9),
        seconds=column(0.5, 1.0, 0.1, 2.0) if seconds else None,
        memory=MemoryCosts(
            state_bytes=column(1600, 640, 32, 1600),
            activation_bytes=column(10, 100, 5, 900),
            in_flight=in_flight,
        ),
    )


def partitioned(method, layers, ranks, casts=False, seconds=None, micro_batches=8, is_v_schedule=False):
    per_rank = 2 if is_v_schedule else 1
    chunks = per_rank * ranks
    live = [min(micro_batches, chunks - stage) for stage in range(chunks)]
    shape = PipelineShape(ranks, per_rank, is_v_schedule)
    return partition_layers(parse_partition_method(method), table(layers, casts, seconds, live), shape)


def bounds(method, layers, stages, **options):
    return partitioned(method, layers, stages, **options).bounds


def test_bloom_is_partitioned_as_it_was_trained():
    """BLOOM's stages: embedding and 5 layers, ten stages of 6 layers, 5 layers and the head."""
    assert bounds("type:transformer|embedding", 70, 12, casts=True) == [0, 8, *range(14, 69, 6), 77]


def test_an_embedding_as_heavy_as_two_layers_has_a_stage_of_its_own():
    found = bounds("type:embed:2|transformer:1", 60, 32, casts=True)
    assert found == [0, 2, 5, *range(7, 64, 2), 67]
    assert bounds("weighted_type:embed:2|transformer", 60, 32, casts=True) == found


def test_sixty_two_layers_on_thirty_two_stages():
    assert bounds("type:embed|transformer", 62, 32, casts=True) == [0, 4, *range(6, 65, 2), 69]


def test_transformer_layers_are_shared_out_evenly():
    assert bounds("type:transformer", 8, 4) == [0, 5, 7, 9, 14]


def test_the_embedding_and_the_head_can_weigh_differently():
    found = partitioned("type:embed@first:1|embed@last:4|transformer:1", 7, 3)
    assert found.weights == [4, 4, 4]
    assert found.bounds == [0, 6, 10, 13]


def test_the_first_alternative_that_matches_wins():
    assert bounds("type:Parallel:1|pipe:2", 6, 4) == bounds("type:transformer|embed:2", 6, 4)


def test_parameters_weigh_the_layers():
    found = partitioned("parameters", 4, 2)
    counts = table(4).parameters
    assert max(found.weights) * 1e6 == min(max(sum(counts[:i]), sum(counts[i:])) for i in range(1, 10))


@pytest.mark.parametrize("method", ["time", "profile"])
def test_a_head_that_works_as_two_layers_counts_as_two(method):
    found = partitioned(method, 6, 4, seconds=True)
    assert found.bounds[-2] == 9, "the head is on a stage without transformer layers"


def test_a_profile_without_measurement_is_refused():
    with pytest.raises(ConfigError, match="--partition-profile FILE"):
        partitioned("profile", 6, 4)


def test_memory_counts_what_the_schedule_keeps_alive():
    """Early stages keep more micro-batches, so they get fewer layers. The largest stage is as small as
    possible."""
    found = partitioned("memory", 10, 3, micro_batches=8)
    memory = table(10).memory

    def stage_bytes(stage, first, last):
        return sum(memory.state_bytes[first:last]) + (3 - stage) * sum(memory.activation_bytes[first:last])

    def largest(candidate):
        return max(stage_bytes(stage, *span) for stage, span in enumerate(pairwise(candidate)))

    best = min(largest([0, a, b, 16]) for a, b in combinations(range(2, 15), 2))
    assert largest(found.bounds) == best
    assert found.bounds[1] - 3 < found.bounds[2] - found.bounds[1]


@pytest.mark.parametrize("is_v_schedule", [False, True])
@pytest.mark.parametrize("method", ["memory", "uniform", "profile", "type:.*"])
def test_each_stage_has_a_layer_with_parameters_even_if_functions_cost_more(method, is_v_schedule):
    costly = replace(
        table(3, seconds=True, in_flight=[1] * 6),
        memory=MemoryCosts([0.0] * 9, [1.0, 1.0, 90.0, 1.0, 1.0, 1.0, 90.0, 1.0, 1.0], [1] * 6),
        seconds=[1.0, 1.0, 90.0, 1.0, 1.0, 1.0, 90.0, 1.0, 1.0],
    )
    shape = PipelineShape(3, 2, True) if is_v_schedule else PipelineShape(6, 1, False)
    found = partition_layers(parse_partition_method(method), costly, shape).bounds
    assert found == [0, 2, 4, 5, 6, 8, 9]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("stages:2,2", [0, 5, 10]),
        ("stages:E,4,0,0", [0, 2, 7, 7, 10]),
        ("stages:E,0,0,4+L", [0, 2, 2, 2, 10]),
        ("layout:E|t|t|t|t|L", [0, 2, 4, 5, 6, 7, 10]),
        ("layout:Et*4|L", [0, 7, 10]),
    ],
)
def test_an_explicit_layout_gives_these_stages(method, expected):
    assert bounds(method, 4, len(expected) - 1) == expected


@pytest.mark.parametrize("stages", range(2, 8))
@pytest.mark.parametrize("casts", [False, True])
def test_neither_tokens_nor_logits_travel_between_stages(stages, casts):
    """Tokens have no gradient, and logits differ between TP ranks. So the layers around an embedding stay on
    its stage."""
    found = bounds("uniform", 4, stages, casts=casts)
    assert found[1] >= 2
    assert found[-2] <= len(layer_list(4, casts)) - 1 - casts
    assert all(first < last for first, last in pairwise(found))


@pytest.mark.parametrize(
    ("method", "stages", "words"),
    [
        ("type:mlp|transformer", 2, ["'mlp'", LAYER, "EmbeddingPipe", "type:embed:2|transformer:1"]),
        ("type:transformer", 5, ["4 layers", "5 stages", LAYER, "--pipeline-model-parallel-size"]),
        ("type:transformer:0", 2, ["0 layers", "none"]),
        ("type:.*:1|embed:5", 2, ["'embed:5' has no effect", "earlier alternatives"]),
        ("uniform", 8, ["7 layers", "8 stages"]),
        ("type:.*", 8, ["7 layers", "8 stages"]),
        ("memory", 8, ["7 layers", "8 stages"]),
        ("parameters", 8, ["7 layers", "8 stages"]),
        ("stages:2,2", 3, ["2 stages", "3", "--pipeline-model-parallel-size"]),
        ("stages:2,3", 2, ["5 transformer layers", "--num-layers is 4"]),
        ("layout:Et|tL", 2, ["2 transformer layers", "--num-layers is 4"]),
    ],
)
def test_a_method_that_cannot_be_used_is_named_with_what_there_is(method, stages, words):
    with pytest.raises(ConfigError) as caught:
        bounds(method, 4, stages)
    assert all(word in str(caught.value) for word in [method, *words])


def test_a_v_balances_the_ranks_and_keeps_the_rule_of_weightless_layers():
    found = partitioned("type:transformer|embed:2", 12, 4, is_v_schedule=True)
    assert [a + b for a, b in zip(found.weights, found.weights[::-1], strict=True)] == [4] * 8
    assert found.bounds[-1] == len(layer_list(12)) and found.bounds[1] == 2


@pytest.mark.parametrize("kind", ["typo", "Uniform", ""])
def test_an_unknown_method_is_an_error_from_code_too(kind):
    method = replace(parse_partition_method("type:transformer"), kind=kind)
    with pytest.raises(ConfigError, match=f"--partition-method is '{kind}': expected one of .*uniform"):
        partition_layers(method, table(4), PipelineShape(2, 1, False))
