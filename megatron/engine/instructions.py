"""Translates the actions of a schedule into the instructions of a step for DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    BufferOpInstruction,
    CommitP2P,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

from megatron.config.sections.parallel import ParallelConfig
from megatron.mpu.mesh import chunks_of_rank
from megatron.pipeline.schedule import actions_of
from megatron.pipeline.schedule_actions import Kind, PipelineAction, ScheduleActions, forward_only


class WeightGradPass(BufferOpInstruction):
    """Computes the weight gradients that the backward pass of the buffer's micro-batch has deferred."""


_SENDS: dict[Kind, type[PipeInstruction]] = {"forward": SendActivation, "backward": SendGrad}
_RECEIVES: dict[Kind, type[PipeInstruction]] = {"forward": RecvActivation, "backward": RecvGrad}
_PASSES: dict[Kind, type[PipeInstruction]] = {
    "forward": ForwardPass,
    "backward": BackwardPass,
    "weight": WeightGradPass,
}


def pipeline_schedule(
    parallel: ParallelConfig, rank: int, micro_batches: int, *, trains: bool
) -> InstructionSchedule:
    """Returns the instructions of a training step (`trains`), or of an evaluation, on a pipeline rank."""
    if trains:
        ranks = parallel.pipeline_model_parallel_size
        actions = actions_of(parallel.pipeline_schedule, ranks, micro_batches, parallel.stages_per_rank)
    else:
        actions = forward_only(parallel.rank_of_stage, micro_batches)
    return InstructionSchedule(actions, micro_batches, rank, trains=trains)


class InstructionSchedule(PipeSchedule):
    """The instructions of a rank.

    The stages of a rank are its model chunks 0, 1, and so on. Each chunk has a buffer for every micro-batch,
    with the index model_chunk_id x micro-batches + micro-batch. A rank loads a micro-batch before its first
    pass.
    """

    def __init__(self, actions: ScheduleActions, micro_batches: int, rank: int, *, trains: bool) -> None:
        super().__init__(micro_batches, max(actions.rank_of_chunk) + 1, rank)
        self._own_steps = actions.steps[rank]
        self._trains = trains
        held = chunks_of_rank(actions.rank_of_chunk, rank)
        self._model_chunk_ids = {stage: model_chunk_id for model_chunk_id, stage in enumerate(held)}

    def num_pipe_buffers(self) -> int:
        return len(self._model_chunk_ids) * self.micro_batches

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the instructions of each step of the schedule, and finally the instructions of the optimizer
        step."""
        for step in self._own_steps:
            yield [
                *self._exchange(step.sends, step.receives),
                *self._exchange(step.late_sends, ()),
                *chain.from_iterable(map(self._pass, step.actions)),
            ]
        if self._trains:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def _exchange(
        self, sends: Sequence[PipelineAction], receives: Sequence[PipelineAction]
    ) -> list[PipeInstruction]:
        """Returns the instructions for messages that are sent and received together."""
        queued = [self._instruction(action, _SENDS[action.kind]) for action in sends]
        queued += [self._instruction(action, _RECEIVES[action.kind]) for action in receives]
        return [*queued, CommitP2P()] if queued else []

    def _pass(self, action: PipelineAction) -> list[PipeInstruction]:
        run = self._instruction(action, _PASSES[action.kind])
        loads = action.kind == "forward" and self._model_chunk_ids[action.chunk] == 0
        return [LoadMicroBatch(run.kwargs["buffer_id"]), run] if loads else [run]

    def _instruction(self, action: PipelineAction, kind: type[PipeInstruction]) -> PipeInstruction:
        model_chunk_id = self._model_chunk_ids[action.chunk]
        buffer_id = model_chunk_id * self.micro_batches + action.micro_batch
        return kind(buffer_id=buffer_id, model_chunk_id=model_chunk_id)
