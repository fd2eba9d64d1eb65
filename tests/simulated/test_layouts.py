"""The whole simulated step in every layout: it is as planned, the host does not wait, the calls match."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megatron.config.sections.curriculum import LengthCurriculum
from megatron.errors import UserError
from megatron.mpu.layout import ParallelLayout
from megatron.pipeline.stages import stage_flops
from megatron.planner.memory import communicators
from megatron.planner.network import ALL_REDUCE
from megatron.planner.simulation.matching import find_deadlock, group_name
from megatron.planner.simulation.memory_tracker import ROUNDING
from megatron.planner.simulation.record import STEP, Instruction
from megatron.planner.simulation.stages import (
    all_calls,
    simulate_ranks,
    simulate_stages,
    step_instructions,
    syncs_per_micro_batch,
)
from megatron.planner.simulation.world import find_stages, simulated_micro_batches
from tests.simulated.comparison import disagreements
from tests.simulated.layouts import LAYOUTS, MORE, config_of

gate = pytest.mark.gate(
    rows=2, also=["context-2-tensor-2-sequence", "pipeline-2-window-pattern", "zero-bubble-4-neox"]
)


@cache
def records_of(name):
    return simulate_stages(config_of(LAYOUTS[name]))


def allowed_per_micro_batch(name):
    """DeepSpeed copies checkpointed activations to host memory and back, and waits on a device without
    streams, as the simulated one is."""
    return ["runtime/activation_checkpointing/"] if "--checkpoint-in-cpu" in LAYOUTS[name] else []


def allowed_per_step(name):
    """Function -> synchronizations per step. The grad norm decides about clipping and skipping; it is read
    together with the exit code."""
    flags = LAYOUTS[name]
    allowed = {"_global_norm": 1}
    if "--spike-policy" in flags:
        allowed["_loss_and_norm_everywhere"] = 2
    if "--cpu-offload" in flags:
        allowed |= {"wait_for_copies": 1}  # before the step on the host
    if "--use-bnb-optimizer" in flags:
        allowed["_step_of"] = 99
    return allowed


@gate
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_host_waits_at_most_once_per_step(name):
    for record in records_of(name):
        found = {
            key: count
            for key, count in syncs_per_micro_batch(record).items()
            if not any(part in key[2] for part in allowed_per_micro_batch(name))
        }
        assert found == {}, f"stage {record.stage}, in every micro-batch"
        allowed = allowed_per_step(name)
        for (kind, sync), count in record.syncs.items():
            if any(part in sync.place for part in allowed_per_micro_batch(name)):
                continue
            if sync.place.endswith(" flush"):
                continue  # the last lines of the log, when the run has ended
            function = sync.place.split(" < ")[0].split(" ")[1]
            assert count <= allowed.get(function, 0), f"stage {record.stage}, {kind}: {sync}"


@gate
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_calls_of_all_ranks_fit(name):
    config = config_of(LAYOUTS[name])
    multiple = config.parallel.micro_batch_multiple
    micro_batches = (2 * config.parallel.num_stages // multiple + 2) * multiple
    assert find_deadlock(all_calls(config, records_of(name), micro_batches)) is None


@gate
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_step_is_planned(name):
    assert disagreements(config_of(LAYOUTS[name]), records_of(name)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_steps_of_more_layouts_are_planned(name):
    config = config_of(MORE[name])
    assert disagreements(config, simulate_stages(config)) == []


@pytest.mark.full
def test_another_step_is_not_the_planned_one():
    """The comparison finds the differences between two layouts, so its silence is a result."""
    found = disagreements(config_of(LAYOUTS["tensor-2"]), records_of("tensor-2-sequence"))
    for what in ("bytes", "peak memory", "allreduce_", "_reduce_scatter_base_", "launches"):
        assert any(what in text for text in found), what


@gate
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_flops_that_partitions_balance_are_those_of_the_step(name):
    """The formulas of `megatron.model.flops`, which need no device, equal the counted FLOPs."""
    config = config_of(LAYOUTS[name])
    vocab, plan = find_stages(config)
    planned = plan.sum_by_rank(stage_flops(config, plan, vocab.size))
    for record in records_of(name):
        found = sum(work.flops for work in record.rest.values())
        assert planned[record.stage] == found, f"stage {record.stage}"


@gate
@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_communicators_are_those_of_the_run(name):
    assert max(record.communicators for record in records_of(name)) == communicators(config_of(LAYOUTS[name]))


@gate
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_start_needs_no_more_memory_than_a_step(name):
    """So the planned peak, which is the peak of a step, is the peak of the run."""
    for record in records_of(name):
        assert record.start_peak <= record.peak.total, f"stage {record.stage}"


def test_a_context_parallel_rank_with_a_different_sequence_length_is_found():
    name = "context-2-tensor-2-sequence"
    config = config_of(LAYOUTS[name])
    calls, layout = all_calls(config, records_of(name), 2), ParallelLayout.from_config(config.parallel, 2)
    groups = [group_name(batch[0].ranks, layout) for batch in calls[2]]
    assert find_deadlock(calls) is None
    gather = groups.index("context")
    (call,) = calls[2][gather]
    calls[2][gather] = (replace(call, elements=2 * call.elements),)
    found = find_deadlock(calls)
    assert "do not match: rank 0 in" in found and f"rank 2 in {call.operation} with 0, 2 of" in found


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["all-three", "dualpipev-2-tensor-2", "pipeline-4-fp32", "interleaved-2", "zero-bubble-4"]
)
def test_more_micro_batches_follow_from_fewer(name):
    """A shorter simulated step predicts the work and the peak of a longer step."""
    config = config_of(LAYOUTS[name])
    more = simulated_micro_batches(config) + 3 * config.parallel.micro_batch_multiple
    (longer,) = simulate_ranks(config, [0], more)
    shorter = records_of(name)[0]
    assert shorter.micro_batches < more
    assert longer.order == step_instructions(config, 0, more)
    for kind, predicted, found in zip(
        [*map(str, longer.order), STEP], shorter.counts_of(longer.order), longer.counts, strict=True
    ):
        assert predicted == found, kind
    # Only DeepSpeed's list of losses grows, by one scalar per micro-batch and copy.
    for found, predicted in ((longer.peak, shorter.peak), (longer.end, shorter.end)):
        assert 0 <= found.total - predicted.total <= 3 * 3 * ROUNDING


def test_gradients_of_buckets_are_reduced_in_the_last_backward_pass():
    """Each of the two buckets has a reduce-scatter for its matrices and one for its vectors."""
    (record,) = records_of("data-4-buckets")
    backward = Instruction("BackwardPass")
    assert [call.operation for call in record.last[backward].calls] == ["_reduce_scatter_base_"] * 4
    assert not record.first[backward].calls and not record.rest[backward].calls


@pytest.mark.full
def test_a_curriculum_is_simulated_at_its_final_length():
    plain = config_of("--world-size 2 --pipeline-model-parallel-size 2 --bf16")
    grows = LengthCurriculum("fixed_discrete", 64, 128, lengths=(64, 128), last_steps=(3,))
    for expected, found in zip(
        simulate_stages(plain), simulate_stages(replace(plain, curriculum=grows)), strict=True
    ):
        assert (found.flops, found.calls) == (expected.flops, expected.calls)
        assert found.peak.total == expected.peak.total


def test_apex_is_refused_by_name():
    with pytest.raises(UserError, match="--use-apex: .* cannot be simulated"):
        simulate_stages(config_of("--use-apex"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["all-three", "all-three-sequence", "context-2-tensor-2-sequence"])
def test_other_ranks_of_a_stage_make_the_same_calls(name):
    """`all_calls` takes the calls of the first tensor, context and data rank for all: the last are simulated.
    With ZeRO the owned parts of small parameters, which are reduced in fp32 after the backward passes, have
    other lengths on other data ranks."""
    config = config_of(LAYOUTS[name])
    per_stage = config.parallel.world_size // config.parallel.pipeline_model_parallel_size
    last = [rank for rank in range(config.parallel.world_size) if rank % per_stage == per_stage - 1]
    found = simulate_ranks(config, last)
    expected = all_calls(config, records_of(name), 5)
    for record in found:
        calls = all_calls(config, [record], 5)[record.rank]
        assert _without_lengths_of_parts(calls) == _without_lengths_of_parts(expected[record.rank])


def _without_lengths_of_parts(calls):
    return [
        tuple(
            replace(call, elements=0, bytes=0)
            if (call.operation, call.dtype) == (ALL_REDUCE, "float32")
            else call
            for call in batch
        )
        for batch in calls
    ]
