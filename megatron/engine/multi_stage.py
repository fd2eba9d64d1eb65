"""DeepSpeed's pipeline engine for ranks that hold one or several stages, in any order of work.

DeepSpeed has such an engine for DualPipeV only. This one runs the same kinds of instructions, see
`engine.instructions`: messages are queued, and CommitP2P sends and receives them together. So a rank never
waits for one message while another rank waits for a message that it could send at the same time. A rank that
only sends waits at the next exchange: the pass between them does not depend on the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import CommitP2P, PipeSchedule
from torch import Tensor

from megatron.engine.instructions import WeightGradPass
from megatron.engine.workarounds import PatchedPipelineEngine
from megatron.mpu.deferred_gradients import accumulate

Tensors = Tensor | tuple[Tensor, ...]
Spec = tuple[torch.Size, torch.dtype]


class MultiStageEngine(PatchedPipelineEngine):
    """Trains a model whose ranks hold one or several stages. A phase is a stage's index on its rank.

    A subclass sets the first two attributes before `__init__`.
    """

    rank_of_stage: Sequence[int]
    """The pipeline rank that holds each stage."""
    make_schedule: Callable[[int, bool], PipeSchedule]
    """The instructions of this rank, by the number of micro-batches and whether it is trained."""

    _is_built = False
    _phase: int | None = None
    """The phase of the pass that runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stages = [stage for stage, rank in enumerate(self.rank_of_stage) if rank == self.stage_id]
        self._schedule = lru_cache(maxsize=4)(self.make_schedule)
        # Messages of the default group would need a communicator of all ranks. All ranks of a group must take
        # part in its first call, as they need not in an exchange of messages.
        self._pipeline = self.grid.get_pipe_parallel_group()
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._pipeline)
        self._messages: list[dist.P2POp] = []
        self._sending: tuple[list[dist.Work], list[dist.P2POp]] = ([], [])
        self._announced: set[int] = set()
        self._input_specs: dict[int, list[Spec]] = {}
        # Gradients of outputs that were received, losses, and gradients of weights that are not computed yet.
        self.pipe_buffers |= {"grads": [], "losses": [], "deferred": []}
        self._is_built = True

    # --- places ---

    def _is_at(self, stage: int) -> bool:
        """During a pass: whether the pass runs this stage. Otherwise: whether this rank holds it."""
        if self._phase is None:
            return self.rank_of_stage[stage] == self.stage_id
        return self._stages[self._phase] == stage

    def is_first_stage(self) -> bool:
        """Whether the current pass is through stage 0; between passes, whether this rank holds stage 0."""
        # While DeepSpeed's `__init__` runs, it asks for the rank's place among its neighbours.
        return self._is_at(0) if self._is_built else super().is_first_stage()

    def is_last_stage(self) -> bool:
        return self._is_at(len(self.rank_of_stage) - 1) if self._is_built else super().is_last_stage()

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self.rank_of_stage[-1]))

    @contextmanager
    def _in_phase(self, phase: int) -> Iterator[None]:
        self._phase = phase
        self.module.activate_phase(phase)
        try:
            yield
        finally:
            self._phase = None

    def _next_on_this_rank(self, buffer_id: int, phase: int) -> int | None:
        """The buffer of the micro-batch in the next stage, if that is on this rank too."""
        following = self._stages[phase] + 1
        if following not in self._stages:
            return None
        return buffer_id + (self._stages.index(following) - phase) * self._buffers_per_phase

    # --- schedule ---

    def _train_schedule(self) -> PipeSchedule:
        return self._schedule(self.micro_batches, True)

    def _inference_schedule(self, micro_batches: int) -> PipeSchedule:
        return self._schedule(micro_batches, False)

    def _exec_schedule(self, pipe_schedule: PipeSchedule) -> None:
        self._buffers_per_phase = pipe_schedule.num_micro_batches
        super()._exec_schedule(pipe_schedule)
        self._wait_for_sends()

    def reset_activation_shape(self) -> None:
        super().reset_activation_shape()
        self._announced.clear()
        self._input_specs.clear()

    # --- passes ---

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        super()._exec_load_micro_batch(buffer_id)
        if self.is_last_stage():
            labels = self.pipe_buffers["labels"]
            loaded, labels[buffer_id] = labels[buffer_id], None
            last = (len(self._stages) - 1) * self._buffers_per_phase
            labels[last + buffer_id % self._buffers_per_phase] = loaded

    def _exec_forward_pass(self, buffer_id: int, phase: int) -> None:
        with self._in_phase(phase):
            super()._exec_forward_pass(buffer_id)
            has_loss = self.is_last_stage()
        buffers, following = self.pipe_buffers, self._next_on_this_rank(buffer_id, phase)
        if following is not None:
            inputs = tuple(
                x.detach().requires_grad_(x.is_floating_point())
                for x in _as_tuple(buffers["outputs"][buffer_id])
            )
            buffers["inputs"][following] = inputs if len(inputs) > 1 else inputs[0]
        if torch.is_grad_enabled():
            if has_loss:
                buffers["losses"][buffer_id] = self.loss
            return
        # In an evaluation nothing else frees what is not sent.
        buffers["inputs"][buffer_id] = buffers["labels"][buffer_id] = None
        if has_loss or following is not None:
            buffers["outputs"][buffer_id] = None

    def _exec_backward_pass(self, buffer_id: int, phase: int) -> None:
        buffers, following = self.pipe_buffers, self._next_on_this_rank(buffer_id, phase)
        if following is not None:
            buffers["grads"][buffer_id] = _gradients(buffers["inputs"][following])
            buffers["inputs"][following] = None
        with self._in_phase(phase):
            if self.is_last_stage():
                self.loss = buffers["losses"][buffer_id]
            else:
                self.grad_layer = buffers["grads"][buffer_id]
            buffers["losses"][buffer_id] = buffers["grads"][buffer_id] = None
            super()._exec_backward_pass(buffer_id)
            # The graph of the loss holds the stage's input and its gradient.
            self.loss, self.grad_layer = self.loss.detach(), None
            buffers["outputs"][buffer_id] = buffers["labels"][buffer_id] = None
            if self.is_first_stage():
                buffers["inputs"][buffer_id] = None  # its gradient is not sent
        if self.module.deferred_gradients is not None:
            buffers["deferred"][buffer_id] = self.module.deferred_gradients.take()

    def _exec_weight_grad_pass(self, buffer_id: int, phase: int) -> None:
        deferred, self.pipe_buffers["deferred"][buffer_id] = self.pipe_buffers["deferred"][buffer_id], None
        accumulate(deferred)

    # --- messages ---

    def _exec_send_activations(self, buffer_id: int, phase: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        target = self.rank_of_stage[self._stages[phase] + 1]
        if phase not in self._announced:
            self._announced.add(phase)
            self._send_tensor_meta(outputs, target)
        self._queue(dist.isend, _as_tuple(outputs), target)
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer_id] = None

    def _exec_recv_activations(self, buffer_id: int, phase: int) -> None:
        source = self.rank_of_stage[self._stages[phase] - 1]
        if phase not in self._input_specs:
            described = _as_tuple(self._recv_tensor_meta(source))
            self._input_specs[phase] = [(x.shape, x.dtype) for x in described]
            self._grad_layer_buf.clear()  # DeepSpeed's buffers of these shapes, which are not used here
        received = tuple(
            torch.empty(shape, dtype=dtype, device=self.device, requires_grad=dtype.is_floating_point)
            for shape, dtype in self._input_specs[phase]
        )
        self._queue(dist.irecv, received, source)
        self.pipe_buffers["inputs"][buffer_id] = received if len(received) > 1 else received[0]

    def _exec_send_grads(self, buffer_id: int, phase: int) -> None:
        gradients = _gradients(self.pipe_buffers["inputs"][buffer_id])
        self._queue(dist.isend, _as_tuple(gradients), self.rank_of_stage[self._stages[phase] - 1])
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int, phase: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        received = tuple(torch.empty_like(x) for x in _as_tuple(outputs) if x.is_floating_point())
        self._queue(dist.irecv, received, self.rank_of_stage[self._stages[phase] + 1])
        self.pipe_buffers["grads"][buffer_id] = received[0] if isinstance(outputs, Tensor) else received

    def _queue(self, operation: Callable, tensors: Sequence[Tensor], rank: int) -> None:
        peer = self.grid.stage_to_global(rank)
        self._messages += [dist.P2POp(operation, x, peer, self._pipeline) for x in tensors]

    def _exec_commit_p2p(self) -> None:
        """Sends and receives the queued messages. Waits for all of them; if nothing is received, at the next
        exchange."""
        self._wait_for_sends()
        messages, self._messages = self._messages, []
        self._sending = dist.batch_isend_irecv(messages), messages
        if any(message.op is dist.irecv for message in messages):
            self._wait_for_sends()

    def _wait_for_sends(self) -> None:
        for request in self._sending[0]:
            request.wait()
        self._sending = [], []  # which held the tensors

    _INSTRUCTION_MAP = {CommitP2P: _exec_commit_p2p, WeightGradPass: _exec_weight_grad_pass}


def _as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _gradients(inputs: Tensors) -> Tensors:
    """The gradients of a stage's inputs; token ids and document ids have none."""
    if isinstance(inputs, Tensor):
        assert inputs.grad is not None
        return inputs.grad
    return tuple(x.grad for x in inputs if x.grad is not None)
