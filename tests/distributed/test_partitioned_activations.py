"""With --partition-activations the tensor-parallel ranks send parts of the activations. Losses equal
unpartitioned messages to the last bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from megatron.config.sections.parallel import ParallelConfig
from tests.support.layouts import DROPOUT, Row, build_engine, config_of, train
from tests.support.pool import run_world

# The stages in the middle receive and send activations and gradients.
LAYOUTS = {
    "1f1b": (Row(tp=2, pp=3, micro_batch=2), {}),
    "zero-bubble": (Row(tp=2, pp=3, micro_batch=2), {"pipeline_schedule": "zero-bubble"}),
    "dualpipev": (Row(tp=2, pp=2, micro_batch=2, recompute=True), {"pipeline_schedule": "dualpipev"}),
    "interleaved": (
        Row(tp=4, pp=2, micro_batch=2),
        {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2},
    ),
    "a stage without layers": (Row(tp=2, pp=3), {"partition_method": "stages:2,0,2"}),
}
STEPS = 2


def outcome(row, parallel, sends_parts):
    """Returns (losses and norms of the steps, sums of the last gradients, number of elements of all
    messages)."""
    elements = []

    def exchange(messages):
        elements.extend(message.tensor.numel() for message in messages if message.op is dist.isend)
        return batch_isend_irecv(messages)

    batch_isend_irecv = dist.batch_isend_irecv
    with (
        mock.patch.object(ParallelConfig, "sends_parts", sends_parts),
        mock.patch.object(dist, "batch_isend_irecv", exchange),
    ):
        engine = build_engine(config_of(row, parallel=parallel, model=DROPOUT))
        history = train(engine, range(STEPS))
    gradients = [flat.gradients.double().sum().item() for flat in engine.optimizer.flat]
    return history, gradients, sum(elements)


def outcomes(row, parallel):
    return outcome(row, parallel, True), outcome(row, parallel, False)


@pytest.mark.gate(rows=1, also=["interleaved"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_give_the_losses_and_gradients_of_whole_messages(name):
    row, parallel = LAYOUTS[name]
    for parts, whole in run_world(row.world_size, outcomes, row, parallel):
        assert parts[:2] == whole[:2]
        assert parts[2] * row.tp == whole[2] > 0
