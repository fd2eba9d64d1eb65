"""At the start of a run with ZeRO-3 the device holds the rank's partition of the model and one layer."""

from __future__ import annotations

import pytest

from megatron.model.layer_kinds import transformer_layers
from megatron.planner.layer_memory import planned_run
from megatron.planner.simulation.memory_tracker import ROUNDING
from tests.simulated.layouts import config_of
from tests.support.simulation.stages import simulate_stages

FP32, BF16 = 4, 2
DATA = 32
ZERO_3 = f"--world-size {DATA} --num-layers 24 --micro-batch-size 1 --bf16 --zero-stage 3"
OFFLOADED = f"{ZERO_3} --cpu-offload"


@pytest.mark.full
@pytest.mark.parametrize("flags", [ZERO_3, OFFLOADED])
def test_zero_3_starts_with_its_shard_and_one_layer(flags):
    config = config_of(flags)
    plan = planned_run(config).stages
    (record,) = simulate_stages(config)
    layers = transformer_layers(plan.layers)
    largest = plan.parameters[layers.start]
    of_layers = len(layers) * largest
    others = plan.stage_parameters(0) - of_layers
    master = 0 if config.parallel.cpu_offload else FP32
    shards = of_layers // DATA * (BF16 + FP32 + master)
    unsharded = others * (BF16 + FP32) + others // DATA * master
    start = record.start_peak
    assert start <= shards + unsharded + largest * (FP32 + BF16) + 40 * (len(layers) + 2) * ROUNDING
    # A device of this size can hold the run, but not the weights of the model.
    assert of_layers * BF16 > 1.2 * start
