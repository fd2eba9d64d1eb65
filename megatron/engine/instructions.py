"""The instructions of a step for DeepSpeed's pipeline engine, from an order of work."""

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

from megatron.config.registry import load_object
from megatron.config.sections.parallel import ParallelConfig
from megatron.pipeline.orders import Kind, Order, Work, forward_only
from megatron.pipeline.schedule import order_of_work


class WeightGradPass(BufferOpInstruction):
    """Computes the gradients of weights that the backward pass of the buffer's micro-batch has left."""


_SENDS: dict[Kind, type[PipeInstruction]] = {"forward": SendActivation, "backward": SendGrad}
_RECEIVES: dict[Kind, type[PipeInstruction]] = {"forward": RecvActivation, "backward": RecvGrad}
_PASSES: dict[Kind, type[PipeInstruction]] = {
    "forward": ForwardPass,
    "backward": BackwardPass,
    "weight": WeightGradPass,
}


def training_schedule(parallel: ParallelConfig, micro_batches: int, rank: int) -> PipeSchedule:
    """The instructions of a training step on a pipeline rank."""
    ranks, schedule = parallel.pipeline_model_parallel_size, parallel.schedule
    if schedule.instructions:
        made: PipeSchedule = load_object(schedule.instructions)(
            micro_batches=micro_batches, stages=ranks, stage_id=rank
        )
        return made
    order = order_of_work(parallel.pipeline_schedule, ranks, micro_batches, parallel.stages_per_rank)
    return OrderSchedule(order, micro_batches, rank, trains=True)


def evaluation_schedule(parallel: ParallelConfig, micro_batches: int, rank: int) -> PipeSchedule:
    """The instructions of an evaluation on a pipeline rank that has several stages."""
    return OrderSchedule(
        forward_only(parallel.rank_of_stage, micro_batches), micro_batches, rank, trains=False
    )


class OrderSchedule(PipeSchedule):
    """An order of work as the instructions of `MultiStageEngine`.

    The stages of a rank are its phases 0, 1 and so on. Each phase has a buffer for every micro-batch:
    phase x micro-batches + micro-batch.
    """

    def __init__(self, order: Order, micro_batches: int, rank: int, *, trains: bool) -> None:
        super().__init__(micro_batches, max(order.rank_of_chunk) + 1, rank)
        self._own_steps = order.steps[rank]
        self._trains = trains
        self._last = len(order.rank_of_chunk) - 1
        held = [stage for stage, holder in enumerate(order.rank_of_chunk) if holder == rank]
        self._phases = {stage: phase for phase, stage in enumerate(held)}

    def num_pipe_buffers(self) -> int:
        return len(self._phases) * self.micro_batches

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step of the order, and at the end those of the optimizer step."""
        for step in self._own_steps:
            yield [
                *self._exchange(step.sends, step.receives),
                *self._exchange(step.late_sends, ()),
                *chain.from_iterable(map(self._pass, step.work)),
            ]
        if self._trains:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def _exchange(self, sends: Sequence[Work], receives: Sequence[Work]) -> list[PipeInstruction]:
        """Messages that are sent and received together."""
        queued = [self._of(work, _SENDS[work.kind]) for work in sends]
        queued += [self._of(work, _RECEIVES[work.kind]) for work in receives]
        return [*queued, CommitP2P()] if queued else []

    def _pass(self, work: Work) -> list[PipeInstruction]:
        run = self._of(work, _PASSES[work.kind])
        # A rank with the first and the last stage loads tokens and labels together.
        loads_at = 0 if 0 in self._phases else self._last
        if work.kind == "forward" and work.chunk == loads_at:
            return [LoadMicroBatch(run.kwargs["buffer_id"]), run]
        return [run]

    def _of(self, work: Work, kind: type[PipeInstruction]) -> PipeInstruction:
        phase = self._phases[work.chunk]
        return kind(buffer_id=phase * self.micro_batches + work.micro_batch, phase=phase)
