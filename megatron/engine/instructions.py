"""An order of work as the instructions of a step for DeepSpeed's pipeline engine."""

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


def pipeline_schedule(
    parallel: ParallelConfig, rank: int, micro_batches: int, *, trains: bool
) -> OrderSchedule:
    """The instructions of a training step, or of an evaluation, on a pipeline rank."""
    if trains:
        ranks = parallel.pipeline_model_parallel_size
        order = order_of_work(parallel.pipeline_schedule, ranks, micro_batches, parallel.stages_per_rank)
    else:
        order = forward_only(parallel.rank_of_stage, micro_batches)
    return OrderSchedule(order, micro_batches, rank, trains=trains)


class OrderSchedule(PipeSchedule):
    """The instructions of a rank.

    The stages of a rank are its phases 0, 1 and so on. Each phase has a buffer for every micro-batch:
    phase x micro-batches + micro-batch. A rank loads a micro-batch before its first pass.
    """

    def __init__(self, order: Order, micro_batches: int, rank: int, *, trains: bool) -> None:
        super().__init__(micro_batches, max(order.rank_of_chunk) + 1, rank)
        self._own_steps = order.steps[rank]
        self._trains = trains
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
        loads = work.kind == "forward" and self._phases[work.chunk] == 0
        return [LoadMicroBatch(run.kwargs["buffer_id"]), run] if loads else [run]

    def _of(self, work: Work, kind: type[PipeInstruction]) -> PipeInstruction:
        phase = self._phases[work.chunk]
        return kind(buffer_id=phase * self.micro_batches + work.micro_batch, phase=phase)
