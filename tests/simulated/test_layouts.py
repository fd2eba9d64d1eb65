"""Simulates a whole step in every layout: the plan is right, the host does not wait, and the calls match."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megatron.config.sections.curriculum import LengthCurriculum
from megatron.mpu.mesh import Mesh
from megatron.pipeline.stages import stage_flops
from megatron.planner.layer_memory import planned_run
from megatron.planner.memory import communicators
from megatron.planner.network import ALL_REDUCE
from megatron.planner.simulation.passes import Kernel, group_name
from megatron.planner.simulation.stage_costs import rank_update
from tests.simulated.comparison import disagreements
from tests.simulated.layouts import LAYOUTS, MORE, config_of
from tests.support.simulation.matching import find_deadlock
from tests.support.simulation.record import Instruction
from tests.support.simulation.stages import (
    all_calls,
    simulate_ranks,
    simulate_stages,
    syncs_per_micro_batch,
)

gate = pytest.mark.gate(
    rows=2, also=["context-2-tensor-2-sequence", "pipeline-2-window-pattern", "zero-bubble-4-neox"]
)


@cache
def records_of(name):
    return simulate_stages(config_of(LAYOUTS[name]))


def is_allowed(name, place):
    """Returns whether the host may wait at a place. The last lines of the log are written after the run has
    ended. DeepSpeed copies checkpointed activations to host memory and back, and waits on a device without
    streams, such as the simulated device."""
    is_copy = "runtime/activation_checkpointing/" in place and "--checkpoint-in-cpu" in LAYOUTS[name]
    return is_copy or place.endswith(" flush")


def allowed_per_step(name):
    """Returns function -> allowed synchronizations per step. The grad norm decides about clipping and
    skipping; it is read together with the exit code."""
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
def test_a_step_is_planned_and_its_host_and_ranks_do_not_wait(name):
    """The plan equals the simulated step. The calls of all ranks match. The FLOPs that partitions balance
    come from formulas without a device, and equal the step's FLOPs. The planned communicators are the step's.
    The start needs no more memory than a step, so the planned peak is the peak of the run."""
    config, records = config_of(LAYOUTS[name]), records_of(name)
    assert disagreements(config, records) == []
    assert find_deadlock(all_calls(config, records)) is None
    run = planned_run(config)
    flops = run.stages.sum_by_rank(stage_flops(config, run.stages, run.vocab.size))
    assert flops == [sum(work.flops for work in record.rest.values()) for record in records]
    assert max(record.communicators for record in records) == communicators(config)
    for record in records:
        assert record.start_peak <= record.peak.total, f"stage {record.stage}"
        waits = {key: n for key, n in syncs_per_micro_batch(record).items() if not is_allowed(name, key[2])}
        assert waits == {}, f"stage {record.stage}, in every micro-batch"
        for (kind, sync), count in record.syncs.items():
            if not is_allowed(name, sync.place):
                function = sync.place.split(" < ")[0].split(" ")[1]
                most = allowed_per_step(name).get(function, 0)
                assert count <= most, f"stage {record.stage}, {kind}: {sync}"


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_steps_of_more_layouts_are_planned(name):
    config = config_of(MORE[name])
    assert disagreements(config, simulate_stages(config)) == []


@pytest.mark.full
def test_another_step_is_not_the_planned_one():
    """The comparison must find the differences between two layouts. Otherwise its silence would prove
    nothing."""
    found = disagreements(config_of(LAYOUTS["tensor-2"]), records_of("tensor-2-sequence"))
    for what in ("bytes", "peak memory", "allreduce_", "_reduce_scatter_base_", "launches"):
        assert any(what in text for text in found), what


def test_each_fp8_weight_is_quantized_once_in_the_planned_step():
    """Each weight is read in bf16 and written twice. Layers in bf16 have no FP8 copies."""
    run = planned_run(config_of(LAYOUTS["fp8-first-last-uneven"]))
    found = [rank_update(run, rank) for rank in (0, 1)]
    kinds = [layer.kind for layer in run.stages.layers if layer.kind]
    assert [kind.fp8_letter for kind in kinds] == [*"BFFFFFFFB"]
    for update, layers in zip(found, (5, 2), strict=True):
        moved = sum(x.bytes for x in update.step if isinstance(x, Kernel) and x.name == "quantize_fp8")
        assert moved == pytest.approx(4 * layers * kinds[0].matrix_elements, rel=0.01)


def test_a_context_parallel_rank_with_a_different_sequence_length_is_found():
    name = "context-2-tensor-2-sequence"
    config = config_of(LAYOUTS[name])
    calls, mesh = all_calls(config, records_of(name)), Mesh.from_config(config.parallel, 2)
    groups = [group_name(batch[0].ranks, mesh) for batch in calls[2]]
    assert find_deadlock(calls) is None
    gather = groups.index("context")
    (call,) = calls[2][gather]
    calls[2][gather] = (replace(call, elements=2 * call.elements),)
    found = find_deadlock(calls)
    assert "do not match: rank 0 in" in found and f"rank 2 in {call.operation} with 0, 2 of" in found


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


@pytest.mark.full
@pytest.mark.parametrize("name", ["all-three", "all-three-sequence", "context-2-tensor-2-sequence"])
def test_other_ranks_of_a_stage_make_the_same_calls(name):
    """`all_calls` derives the calls of all ranks from the first tensor, context and data rank; this test
    simulates the last. With ZeRO, the owned parts of small parameters, which are reduced in fp32 after the
    backward passes, have different lengths on different data ranks."""
    config = config_of(LAYOUTS[name])
    per_stage = config.parallel.world_size // config.parallel.pipeline_model_parallel_size
    last = [rank for rank in range(config.parallel.world_size) if rank % per_stage == per_stage - 1]
    found = simulate_ranks(config, last)
    expected = all_calls(config, records_of(name))
    for record in found:
        calls = all_calls(config, [record])[record.rank]
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
