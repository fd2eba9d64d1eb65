"""Tests the stages of a run, which are computed only from flags."""

import json

import pytest

from megatron.arguments import read_command_line
from megatron.config import ConfigError
from megatron.config.config import settings_of_section
from megatron.model.layer_kinds import layer_kinds, period, settings_for_kinds
from megatron.pipeline import layer_times
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
    # The last stage is on the last rank, so both ranks have the tied matrix.
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
    """A head that costs as much as 60 layers has its own stage."""
    words = pipeline(4) + "--partition-method time --num-layers 9"
    small, large = plan(words, vocab=100), plan(words, vocab=100_000)
    assert small.bounds[-2] < large.bounds[-2]
    assert large.layers[large.bounds[-2]].name == "to_batch_first"


FP8 = "--hidden-size 128 --bf16 --fp8-format e4m3 --fp8-min-size 0"


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ("", 1),
        ("--window-size 8", 1),
        ("--window-size 8 --window-pattern W W F --num-layers 7", 3),
        (f"{FP8} --first-last-layers-bf16 --num-layers 6", 6),
        (f"{FP8} --fp8-layer-pattern F F B --num-layers 7", 3),
        ("--num-experts 4", 1),
        ("--num-experts 4 --moe-layer-freq 3 --num-layers 7", 3),
        ("--num-experts 4 --moe-layer-freq 2 --window-size 8 --window-pattern W W F --num-layers 12", 6),
    ],
)
def test_the_settings_of_kinds_make_a_model_with_layers_of_these_kinds(words, length):
    config = read_command_line([*FLAGS.split(), *words.split()], {}).config
    kinds = layer_kinds(config.model)
    assert period(kinds) == length
    for part in (kinds, kinds[1:], kinds[-2:]):
        assert layer_kinds(config.with_settings(settings_for_kinds(part)).model) == part


EXPERTS = (
    "--num-layers 6 --num-experts 8 --moe-layer-freq D E E --moe-ffn-hidden-size 48 "
    "--moe-shared-expert-intermediate-size 16 --glu-activation swiglu --disable-bias-linear "
)


def test_parameters_of_experts_are_counted_in_total_per_token_and_per_rank():
    one, expert, layers = plan(EXPERTS), 3 * 48 * 64, 4
    assert one.total_parameters - one.active_parameters == layers * (8 - 2) * expert
    assert plan("").active_parameters == plan("").total_parameters
    shared = plan(EXPERTS + "--world-size 4 --expert-model-parallel-size 4")
    assert shared.total_parameters == one.total_parameters
    assert one.stage_parameters(0) - shared.stage_parameters(0) == layers * (8 - 2) * expert


@pytest.mark.parametrize(
    "words",
    ["", "--untie-embeddings-and-output-weights", "--num-experts 8 --moe-layer-freq 1", EXPERTS],
)
def test_the_matrix_elements_of_a_kind_are_those_of_its_parameters(words):
    flags = f"{words} --disable-bias-linear --normalization RMSNorm "
    config = read_command_line([*FLAGS.split(), *flags.split()], {}).config
    found, kinds = plan(flags), layer_kinds(config.model)
    norms = 2 * 64
    layers = [layer for layer, entry in enumerate(found.layers) if entry.kind]
    assert [found.parameters[layer] - norms for layer in layers] == [kind.matrix_elements for kind in kinds]
    unused = found.total_parameters - found.active_parameters
    assert unused == sum(kind.unused_elements for kind in kinds)


def test_partition_methods_and_times_tell_layers_with_experts_from_dense_ones():
    words = pipeline(3) + EXPERTS + "--moe-router-topk 8 "
    assert plan(words + "--partition-method type:@experts:2|@dense:1").rank_weights() == [3, 3, 4]
    names = {layer.time_name for layer in plan(words).layers if layer.kind}
    assert names == {"ParallelTransformerLayerPipe@dense", "ParallelTransformerLayerPipe@experts"}
    one_kind = plan(pipeline(3) + "--num-layers 6 --num-experts 8").layers
    assert {layer.time_name for layer in one_kind if layer.kind} == {"ParallelTransformerLayerPipe"}


def test_settings_that_a_profile_lacks_had_their_defaults(tmp_path):
    file = tmp_path / "times.json"
    flags = [*FLAGS.split(), "--partition-method", "profile", "--partition-profile", str(file)]
    dense = read_command_line(flags, {}).config
    older = layer_times._shapes(dense, 1000)
    defaults = {setting.field: setting.default for setting in settings_of_section("model")}
    new = {"num_experts", "softmax_type", "attention_output_gate", "final_logit_softcapping"}
    assert new <= (new_keys := {key for key, value in older.items() if value == defaults.get(key, older)})
    for name in {*new_keys, "context_parallel_size", "fp8_format", "fp8_min_size", "recompute_modules"}:
        del older[name]
    file.write_text(json.dumps({"measured_for": older, "seconds": {"EmbeddingPipe": 1.0}}))
    assert layer_times.read_layer_times(dense, 1000) == {"EmbeddingPipe": 1.0}
    for words in (
        "--num-experts 4",
        "--softmax-type learnable",
        "--recompute-granularity selective --recompute-modules mlp_act",
    ):
        changed = read_command_line([*flags, *words.split()], {}).config
        with pytest.raises(ConfigError, match="was measured with other settings"):
            layer_times.read_layer_times(changed, 1000)
    del older["hidden_size"]
    file.write_text(json.dumps({"measured_for": older, "seconds": {"EmbeddingPipe": 1.0}}))
    with pytest.raises(ConfigError, match="it lacks the settings hidden_size"):
        layer_times.read_layer_times(dense, 1000)
    experts = read_command_line([*flags, "--num-experts", "4"], {}).config
    times = {"measured_for": layer_times._shapes(experts, 1000), "seconds": {"EmbeddingPipe": 1.0}}
    file.write_text(json.dumps(times))
    with pytest.raises(ConfigError, match="num_experts was 4, is None"):
        layer_times.read_layer_times(dense, 1000)
