"""What the start of a run with ZeRO-3 needs on the device: its part of the model, and one layer."""

from __future__ import annotations

import pytest

from megatron.planner.memory.flat_buffers import rank_buffers
from megatron.simulation.memory import ROUNDING
from megatron.simulation.stages import simulate_stages
from megatron.simulation.world import plan_of
from tests.simulated.layouts import config_of

FP32, BF16 = 4, 2
DATA = 32
ZERO_3 = f"--world-size {DATA} --num-layers 24 --micro-batch-size 1 --bf16 --zero-stage 3"
OFFLOADED = f"{ZERO_3} --cpu-offload"


@pytest.mark.full
@pytest.mark.parametrize("flags", [ZERO_3, OFFLOADED])
def test_zero_3_starts_with_its_shard_and_one_layer(flags):
    config = config_of(flags)
    vocab, plan = plan_of(config)
    (record,) = simulate_stages(config)
    buffers = rank_buffers(config, plan, vocab.size, [0])
    layers = [buffer for buffer in buffers if buffer.shards_gradients]
    others = sum(buffer.length for buffer in buffers if not buffer.shards_gradients)
    of_layers = sum(buffer.length for buffer in layers)
    largest = sum(p.elements for p in {id(b): b for b in layers[:2]}.values() for p in p.parameters)
    master = 0 if config.parallel.cpu_offload else FP32
    shards = of_layers // DATA * (BF16 + FP32 + master)
    unsharded = others * (BF16 + FP32) + others // DATA * master
    start = record.start_peak
    assert start <= shards + unsharded + largest * (FP32 + BF16) + 20 * len(buffers) * ROUNDING
    # A device of this size holds the run, and not the weights of the model.
    assert of_layers * BF16 > 1.2 * start
