"""The planned collectives of a step are those of the simulated step: groups, calls and bytes, exactly."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.mpu.layout import ParallelLayout
from megatron.planner.timing.communication import ALL_GATHER, REDUCE_SCATTER, rank_communication
from megatron.simulation.record import Instruction
from megatron.simulation.stages import simulate_stages
from megatron.simulation.world import plan_of
from tests.simulated.layouts import LAYOUTS, NO_DROPOUT, config_of
from tests.simulated.test_layouts import GATE_ROWS, records_of

# What the layouts of the other tests do not combine.
MORE = {
    "plain-loss": "--world-size 2 --tensor-model-parallel-size 2 --bf16 --loss-implementation plain",
    "average-zero1": "--world-size 4 --tensor-model-parallel-size 2 --bf16 --zero-stage 1 "
    "--sync-tp-duplicated-parameters",
    "zero3-tensor": "--world-size 4 --tensor-model-parallel-size 2 --bf16 --zero-stage 3 --sequence-parallel",
    "zero3-groups": "--world-size 2 --bf16 --zero-stage 3 --checkpoint-activations "
    f"--checkpoint-num-layers 3 {NO_DROPOUT}",
    "8-bit-tensor": "--world-size 4 --tensor-model-parallel-size 2 --bf16 --zero-stage 1 --use-bnb-optimizer",
    "late-gradients": "--world-size 2 --bf16 --zero-stage 1 --ddp-bucket-size 1 --no-overlap-grad-reduce",
    "early-weights": "--world-size 2 --bf16 --zero-stage 1 --ddp-bucket-size 1 --no-overlap-param-gather",
    "no-overlap": "--world-size 2 --bf16 --zero-stage 1 --ddp-bucket-size 1 --no-overlap-grad-reduce "
    "--no-overlap-param-gather",
    "documents": "--world-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 "
    "--position-embedding-type rotary --reset-position-ids",
    "sequence-fp32-residual": "--world-size 4 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --bf16 "
    f"--sequence-parallel --fp32-residual-connection --checkpoint-activations {NO_DROPOUT}",
    "mup-swiglu": "--world-size 4 --tensor-model-parallel-size 2 --bf16 --zero-stage 1 --mup "
    "--mup-base-hidden-size 32 --glu-activation swiglu",
}


def check(config, records):
    vocab, plan = plan_of(config)
    for record in records:
        layout = ParallelLayout.from_config(config.parallel, record.rank)
        found = Counter((call.operation, call.ranks, call.bytes) for call in record.calls)
        planned: Counter = Counter()
        for one in rank_communication(config, plan, vocab.size, record.stage).exchanges(record.micro_batches):
            planned[one.operation, one.ranks(layout), one.bytes] += one.calls
        assert planned == found, f"stage {record.stage}"


@pytest.mark.gate(rows=GATE_ROWS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_collectives_are_those_of_the_step(name):
    check(config_of(LAYOUTS[name]), records_of(name))


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_planned_collectives_of_more_layouts(name):
    config = config_of(MORE[name])
    check(config, simulate_stages(config))


def test_gradients_of_buckets_are_reduced_in_the_last_backward_pass():
    """A reduce-scatter for the matrices and one for the vectors of both buckets; later those of the rest."""
    (record,) = records_of("data-4-buckets")
    backward = Instruction("BackwardPass")
    assert [call.operation for call in record.last[backward].calls] == [REDUCE_SCATTER] * 4
    assert not record.first[backward].calls and not record.rest[backward].calls
    operations = [call.operation for call in record.calls]
    assert operations.count(REDUCE_SCATTER) == operations.count(ALL_GATHER) == 4 + 2
