"""Entries 16 to 18 of `megatron/engine/workarounds.py`, with real tensors: the numbers are DeepSpeed's."""

from __future__ import annotations

from unittest import mock

import deepspeed.runtime.pipe.engine as pipe_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import PartitionedTensor

from megatron.engine.pipeline_engine import GPTEngine
from megatron.testing.layouts import Row, build_engine, config_of, train
from megatron.testing.pool import run_world

# The stages in the middle receive and send partitioned activations and gradients.
ROW = Row(tp=2, pp=3, micro_batch=2)
STEPS = 3


class DeepSpeedsEngine(GPTEngine):
    """Without the three entries."""

    _aggregate_total_loss = PipelineEngine._aggregate_total_loss

    def _exec_backward_pass(self, buffer_id):
        if self.is_last_stage():
            self.loss = self.loss * self.optimizer.scaler.scale
        PipelineEngine._exec_backward_pass(self, buffer_id)


def outcome(engine_class, tensor_class):
    """Losses and norms of the steps, sums of the last gradients, and (all-gathers, tables that were made)."""
    tables, held, gathered = [], [], []

    class Partitioned(tensor_class):
        def to_meta(self):
            table = super().to_meta()
            tables.append(table.data_ptr())
            held.append(table)  # so that no other tensor gets its address
            return table

        def full(self, device=None):
            gathered.append(self.full_size())
            return super().full(device)

    patches = (
        mock.patch("megatron.engine.pipeline_engine.GPTEngine", engine_class),
        mock.patch.object(pipe_engine, "PartitionedTensor", Partitioned),
    )
    with patches[0], patches[1]:
        engine = build_engine(config_of(ROW))
        history = train(engine, range(STEPS))
    gradients = [flat.gradients.double().sum().item() for flat in engine.optimizer.flat]
    return history, gradients, len(gathered), len(set(tables))


def outcomes():
    ours = pipe_engine.PartitionedTensor
    return outcome(DeepSpeedsEngine, PartitionedTensor), outcome(GPTEngine, ours)


def test_losses_and_gradients_are_deepspeeds_with_fewer_calls_and_tables():
    micro_batches = STEPS * 8 // ROW.micro_batch
    for rank, (theirs, ours) in enumerate(run_world(ROW.world_size, outcomes)):
        assert ours[:2] == theirs[:2]
        stage = rank // ROW.tp
        receives, sends = stage > 0, stage < ROW.pp - 1
        # DeepSpeed gathers a stage's input, the gradient of its output, and that output.
        assert theirs[2] == micro_batches * (receives + 2 * sends)
        assert ours[2] == micro_batches * (receives + sends)
        assert theirs[3] == micro_batches * (receives + sends)
        assert ours[3] == 1
