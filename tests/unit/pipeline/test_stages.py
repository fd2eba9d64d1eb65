"""The stages of a run, computed only from flags."""

import pytest

from megatron.arguments import read_command_line
from megatron.config import ConfigError
from megatron.model.layer_kinds import layer_kinds, period, settings_for_kinds
from megatron.planner.layer_memory import planned_run

FLAGS = (
    "--dry-run --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-3"
)


def plan(words, vocab=1000):
    return planned_run(read_command_line([*FLAGS.split(), *words.split()], {}).config, vocab).stages


def pipeline(stages):
    return f"--world-size {stages} --pipeline-model-parallel-size {stages} "


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (pipeline(8), ("4 layers", "8 stages", "type:transformer", "--pipeline-model-parallel-size")),
        (pipeline(2) + "--partition-method profile", ("--partition-profile FILE",)),
        (pipeline(2) + "--pipeline-schedule dualpipev --partition-method stages:2,2", ("2 stages", "4")),
        (pipeline(2) + "--virtual-pipeline-stages 3", ("4 layers", "6 stages (3 x", "--virtual-pipeline")),
        (
            pipeline(2) + "--virtual-pipeline-stages 2 --partition-method stages:2,2",
            ("2 stages", "4, 2 per pipeline rank"),
        ),
    ],
)
def test_an_impossible_partition_is_refused_before_any_process_group_is_created(words, parts):
    with pytest.raises(ConfigError) as caught:
        plan(words)
    assert all(part in str(caught.value) for part in parts)


def test_a_stage_counts_the_parameters_that_its_rank_holds():
    one, two = plan(""), plan(pipeline(2))
    assert one.stage_parameters(0) == one.total_parameters  # the tied matrix once
    words = 64 * 1024  # padded
    assert two.stage_parameters(0) + two.stage_parameters(1) == one.total_parameters + words


def test_in_a_v_the_first_rank_holds_the_tied_matrix_once():
    found = plan(pipeline(2) + "--pipeline-schedule dualpipev")
    assert found.rank_of_stage == (0, 1, 1, 0) and len(found.bounds) == 5
    assert [found.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert found.rank_weights() == [2, 2]
    assert sum(found.stage_parameters(stage) for stage in range(4)) == found.total_parameters


def test_interleaved_stages_go_round_the_ranks():
    found = plan(pipeline(2) + "--virtual-pipeline-stages 2")
    assert found.rank_of_stage == (0, 1, 0, 1) and found.rank_weights() == [2, 2]
    # The last stage is on the last rank, so both ranks hold the tied matrix.
    words = 64 * 1024
    held = sum(found.stage_parameters(stage) for stage in range(4))
    assert held == found.total_parameters + words


@pytest.mark.parametrize("method", ["memory", "time", "parameters", "uniform", "type:embed:2|transformer"])
@pytest.mark.parametrize(
    "schedule",
    [
        "--pipeline-schedule 1f1b",
        "--pipeline-schedule dualpipev",
        "--virtual-pipeline-stages 2",
        "--pipeline-schedule zero-bubble",
    ],
)
def test_every_method_gives_every_stage_a_layer(method, schedule):
    words = f"{schedule} --partition-method {method} --num-layers 8 --global-batch-size 12"
    found = plan(pipeline(3) + words)
    assert all(first < last for first, last in zip(found.bounds, found.bounds[1:], strict=False))
    assert len(found.partition.weights) == len(found.bounds) - 1


def test_a_large_vocabulary_moves_layers_away_from_the_head():
    """A head of 60 layers' work has its stage to itself."""
    words = pipeline(4) + "--partition-method time --num-layers 9"
    small, large = plan(words, vocab=100), plan(words, vocab=100_000)
    assert small.bounds[-2] < large.bounds[-2]
    assert large.layers[large.bounds[-2]].name == "to_batch_first"


@pytest.mark.parametrize(
    ("words", "length"),
    [("", 1), ("--window-size 8", 1), ("--window-size 8 --window-pattern W W F --num-layers 7", 3)],
)
def test_the_settings_of_kinds_make_a_model_with_layers_of_these_kinds(words, length):
    config = read_command_line([*FLAGS.split(), *words.split()], {}).config
    kinds = layer_kinds(config.model)
    assert period(kinds) == length
    for part in (kinds, kinds[1:], kinds[-2:]):
        assert layer_kinds(config.with_settings(settings_for_kinds(part)).model) == part
