"""The executor of pipeline schedules: DeepSpeed's pipeline engine for ranks with one or several stages.

It runs the instructions of `engine.instructions`. Messages are queued, and CommitP2P sends and receives all
queued messages together. So a rank never waits for one message while another rank waits for a message that it
could send at the same time. A rank that only sends waits for the send at its next exchange, and not before
the pass in between.

Without sequence parallelism all tensor-parallel ranks hold the full hidden state between two stages. Each
rank sends only its part of it, and the receivers all-gather the parts when their pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.schedule import CommitP2P
from torch import Tensor

from megatron.config.sections.parallel import ParallelConfig
from megatron.data.loader import MicroBatch
from megatron.engine.instructions import InstructionSchedule, WeightGradPass, pipeline_schedule
from megatron.engine.workarounds import PatchedPipelineEngine
from megatron.mpu.mesh import Axis, chunks_of_rank
from megatron.mpu.weight_gradient import accumulate
from megatron.torch_versions import all_gather_single

Tensors = tuple[Tensor, ...]


class ScheduleExecutor(PatchedPipelineEngine):
    """Trains a model by any schedule. `model_chunk_id` is the index of a stage among the stages of its rank.

    It adds buffers to DeepSpeed's, which are indexed by the instructions' buffer_id: "messages" (outputs to
    be sent, and received gradients of outputs), "losses", "deferred" (weight gradients that are not computed
    yet), and "samples" (the sample numbers of a micro-batch).
    """

    loss: Tensor
    total_loss: Tensor | None
    _tokens_per_micro_batch: Tensor | None = None
    """For each loss, the mean number of unmasked tokens per micro-batch, over all ranks and micro-batches of
    the step: the `counts` of `loss_inputs`. None if the step masks no token."""
    _loss_tokens: Tensor | int = 0
    """The number of tokens by which the loss of a micro-batch is divided, regardless of its mask."""
    _own_tokens = 0.0
    """Number of unmasked tokens in this rank's micro-batches."""
    grad_layer: Tensors | None
    _is_built = False
    _model_chunk_id: int | None = None
    """The model chunk whose pass is running; None between passes."""
    _seq_length: int
    """Tokens per sample of the micro-batches."""

    def __init__(self, parallel: ParallelConfig, tp_group: Axis, **options: Any) -> None:
        """options: keyword arguments of DeepSpeed's engine."""
        self._rank_of_stage = parallel.rank_of_stage
        self._scatter_group = tp_group if parallel.sends_parts else Axis("tp")
        super().__init__(**options)
        self.is_pipe_partitioned = self.is_grad_partitioned = False  # this class splits messages
        self._stages = chunks_of_rank(self._rank_of_stage, self.stage_id)
        self._make_schedule = lru_cache(4)(partial(pipeline_schedule, parallel, self.stage_id))
        # Messages in the default group would need a communicator of all ranks, so the pipeline's group is
        # used. All ranks of a group must take part in its first call, but not all take part in each message
        # exchange. Therefore the first call is this all-reduce.
        self._pipeline = self.grid.get_pipe_parallel_group()
        if self.is_pipe_parallel:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._pipeline)
        self._messages: list[dist.P2POp] = []
        self._sending: tuple[list[dist.Work], list[dist.P2POp]] = ([], [])
        self.pipe_buffers |= {"messages": [], "losses": [], "deferred": [], "samples": []}
        self._is_built = True

    # --- stages ---

    def _runs_stage(self, stage: int) -> bool:
        """Returns whether the current pass runs `stage`. Between passes it returns whether this rank holds
        `stage`."""
        if self._model_chunk_id is None:
            return self._rank_of_stage[stage] == self.stage_id
        return self._stages[self._model_chunk_id] == stage

    def is_first_stage(self) -> bool:
        """Returns whether the current pass runs stage 0. Between passes it returns whether this rank holds
        stage 0."""
        # Entry 22 of `engine.workarounds`: a stage that is both first and last has no neighbors.
        return not self._is_built or self._runs_stage(0)

    def is_last_stage(self) -> bool:
        return not self._is_built or self._runs_stage(len(self._rank_of_stage) - 1)

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self._rank_of_stage[-1]))

    @contextmanager
    def _in_model_chunk(self, model_chunk_id: int) -> Iterator[None]:
        self._model_chunk_id = model_chunk_id
        self.module.activate_model_chunk(model_chunk_id)
        try:
            yield
        finally:
            self._model_chunk_id = None

    def _receives(self, model_chunk_id: int) -> bool:
        """Returns whether the input of the chunk's stage comes from a different rank."""
        stage = self._stages[model_chunk_id]
        return stage > 0 and self._rank_of_stage[stage - 1] != self.stage_id

    def _next_on_this_rank(self, buffer_id: int, model_chunk_id: int) -> int | None:
        """Returns the micro-batch's buffer in the next stage, or None if a different rank holds this
        stage."""
        following = self._stages[model_chunk_id] + 1
        if following not in self._stages:
            return None
        return buffer_id + (self._stages.index(following) - model_chunk_id) * self._buffers_per_chunk

    # --- schedule ---

    def set_dataiterator(self, iterator: Iterator[MicroBatch]) -> None:
        """Sets the iterator on every rank, since every rank needs the sample numbers."""
        self.data_iterator = iterator

    def _train_schedule(self) -> InstructionSchedule:
        return self._make_schedule(self.micro_batches, trains=True)

    def _inference_schedule(self, micro_batches: int) -> InstructionSchedule:
        return self._make_schedule(micro_batches, trains=False)

    def _exec_schedule(self, pipe_schedule: InstructionSchedule) -> None:
        self._buffers_per_chunk = pipe_schedule.num_micro_batches
        self._own_tokens = 0.0
        super()._exec_schedule(pipe_schedule)
        self._wait_for_sends()

    # --- passes ---

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        """Copies the parts of a micro-batch that the rank's stages need to the device, asynchronously from
        pinned memory."""
        micro_batch, buffers = next(self.data_iterator), self.pipe_buffers
        if not isinstance(micro_batch, MicroBatch):
            raise TypeError(
                f"the iterator yields {type(micro_batch).__name__}: expected megatron.data.loader.MicroBatch"
            )

        def send(x: Tensor) -> Tensor:
            return get_accelerator().pin_memory(x).to(self.device, non_blocking=True)

        buffers["samples"][buffer_id] = micro_batch.samples
        if self.is_first_stage():
            buffers["inputs"][buffer_id] = tuple(map(send, micro_batch.inputs))
        if self.is_last_stage():
            last = (len(self._stages) - 1) * self._buffers_per_chunk
            mask = micro_batch.loss_mask
            own_tokens = mask.sum().item()  # in host memory
            counts: Tensor | list[int] | None = None
            if self.module.training:
                counts = self._tokens_per_micro_batch
            if self.module.training and counts is None and own_tokens < mask.numel():
                raise ValueError("the step masks tokens: expected train_step(..., masks_tokens=True)")
            if counts is None:
                depths = range(self.module.loss_depths if self.module.training else 1)
                counts = [max(mask[:, depth:].numel(), 1) for depth in depths]
            self._own_tokens += own_tokens
            self._loss_tokens = counts[0]
            inputs = map(send, micro_batch.inputs if self.module.loss_reads_tokens else ())
            read = self.module.loss_inputs(send(micro_batch.labels), send(mask), counts, *inputs)
            buffers["labels"][last + buffer_id] = read

    def _exec_forward_pass(self, buffer_id: int, model_chunk_id: int) -> None:
        buffers, following = self.pipe_buffers, self._next_on_this_rank(buffer_id, model_chunk_id)
        if self._receives(model_chunk_id):
            buffers["inputs"][buffer_id] = _leaves(self._gather(buffers["inputs"][buffer_id]))
        inputs = buffers["inputs"][buffer_id]
        with self._in_model_chunk(model_chunk_id):
            # The forward pass of DeepSpeed's pipeline engine, which is overridden, would clone the inputs.
            found = DeepSpeedEngine.forward(self, inputs if len(inputs) > 1 else inputs[0])
            if not self.module.training:
                checkpointing.reset()
            has_loss = self.is_last_stage()
            if has_loss:
                self._add_loss(buffer_id, found)
        outputs = (found,) if isinstance(found, Tensor) else found
        if following is not None:
            buffers["inputs"][following] = _leaves(x.detach() for x in outputs)
        elif not has_loss:
            stage, rows = self._stages[model_chunk_id], self.micro_batch_size
            self.module.check_stage_output(stage, outputs, rows, self._seq_length)
            buffers["messages"][buffer_id] = self._split_off(outputs)
        if torch.is_grad_enabled():
            buffers["outputs"][buffer_id] = outputs
        else:
            buffers["inputs"][buffer_id] = buffers["labels"][buffer_id] = None

    def _add_loss(self, buffer_id: int, outputs: Tensor) -> None:
        """Computes the loss from the outputs of the last stage, and stores it where DeepSpeed's engine
        does."""
        if self.eval_return_logits:
            self.outputs = outputs
        labels = self.pipe_buffers["labels"][buffer_id]
        self.loss = self.module.loss_fn(outputs, labels) if self._compute_loss else outputs
        self._count_loss(self.module.main_loss if self._compute_loss else outputs.detach())
        if torch.is_grad_enabled():
            self.pipe_buffers["losses"][buffer_id] = self.loss

    def _count_loss(self, loss: Tensor) -> None:
        """Adds the loss of a micro-batch to the sums of the step or evaluation."""
        self.fwd_outputs.append(loss)
        self.total_loss = loss.clone() if self.total_loss is None else self.total_loss + loss

    def token_totals(self) -> Tensor:
        """Returns two numbers of the last step or evaluation, equal on all ranks: the sum of the losses of
        all unmasked tokens, and the number of these tokens. It is a collective."""
        totals = self._own_token_totals()
        if self.is_last_stage() and self.is_data_parallel:
            dist.all_reduce(totals, group=self.grid.get_data_parallel_group())
        if self.is_pipe_parallel:
            dist.broadcast(totals, self._loss_stage_global_rank(), group=self._pipeline)
        return totals

    def _own_token_totals(self) -> Tensor:
        """Returns this replica's part of `token_totals`, which is zero on ranks without the head."""
        if not self.is_last_stage():
            return torch.zeros(2, device=self.device)
        losses = torch.stack(self.fwd_outputs).sum() * self._loss_tokens
        # The loss on each context-parallel rank is CP times its part, and each of these ranks counts all
        # tokens.
        return torch.stack((losses, torch.full_like(losses, self._own_tokens))) / self.module.mesh.cp.size

    def _aggregate_total_loss(self) -> Tensor:
        """Returns the mean loss of the step (entry 18 of `engine.workarounds`)."""
        losses, tokens = self.token_totals()
        return losses / tokens

    def _exec_backward_pass(self, buffer_id: int, model_chunk_id: int) -> None:
        buffers, following = self.pipe_buffers, self._next_on_this_rank(buffer_id, model_chunk_id)
        with self._in_model_chunk(model_chunk_id):
            if self.is_last_stage():
                # Only the last stage has a loss to scale; the other stages receive scaled gradients.
                self.loss = buffers["losses"][buffer_id] * self.optimizer.scaler.scale
                buffers["losses"][buffer_id] = None
            elif following is not None:
                self.grad_layer = _gradients(buffers["inputs"][following])
                buffers["inputs"][following] = None
            else:
                self.grad_layer = self._gather(buffers["messages"][buffer_id])
                buffers["messages"][buffer_id] = None
            super()._exec_backward_pass(buffer_id)
            # The graph of the loss keeps the stage's input and its gradient in memory.
            self.loss, self.grad_layer = self.loss.detach(), None
            buffers["outputs"][buffer_id] = buffers["labels"][buffer_id] = None
            if self.is_first_stage():
                buffers["inputs"][buffer_id] = None  # the gradient of the first stage's input is not sent
        if self.module.deferred_gradients is not None:
            buffers["deferred"][buffer_id] = self.module.deferred_gradients.take()

    def _exec_weight_grad_pass(self, buffer_id: int, model_chunk_id: int) -> None:
        deferred, self.pipe_buffers["deferred"][buffer_id] = self.pipe_buffers["deferred"][buffer_id], None
        accumulate(deferred)

    # --- messages ---

    def _part(self, hidden: Tensor) -> Tensor:
        """Returns the part of a replicated hidden state [..., hidden] that this tensor-parallel rank sends,
        [..., hidden / parts]. Its elements are consecutive in memory."""
        return hidden.reshape(self._scatter_group.size, *hidden.shape[:-1], -1)[self._scatter_group.rank]

    def _empty_part(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns memory for the part of a hidden state that this rank receives."""
        *outer, hidden_size = shape
        return torch.empty(*outer, hidden_size // self._scatter_group.size, dtype=dtype, device=self.device)

    def _split_off(self, outputs: Tensors) -> Tensors:
        """Returns the tensors that this rank sends from a stage's outputs. If a hidden state is sent in
        parts, it keeps its graph and its shape, but its memory is freed."""
        if self._scatter_group.size == 1:
            return outputs
        hidden, *others = outputs
        part = self._part(hidden.detach()).clone()
        hidden.data = part.new_zeros(()).expand(hidden.shape)
        return part, *others

    def _gather(self, received: Tensors) -> Tensors:
        """All-gathers the hidden state or gradient whose parts the tensor-parallel ranks have received, and
        returns it with the other received tensors."""
        if self._scatter_group.size == 1:
            return received
        part, *others = received
        hidden = part.new_empty(*part.shape[:-1], part.shape[-1] * self._scatter_group.size)
        all_gather_single(hidden.view(-1), part.view(-1), group=self._scatter_group.group)
        return hidden, *others

    def _exec_send_activations(self, buffer_id: int, model_chunk_id: int) -> None:
        target = self._rank_of_stage[self._stages[model_chunk_id] + 1]
        message, self.pipe_buffers["messages"][buffer_id] = self.pipe_buffers["messages"][buffer_id], None
        self._queue(dist.isend, message, target)

    def _exec_recv_activations(self, buffer_id: int, model_chunk_id: int) -> None:
        stage = self._stages[model_chunk_id]
        hidden, *others = self.module.stage_input(stage, self.micro_batch_size, self._seq_length)
        received = (
            self._empty_part(*hidden),
            *(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in others),
        )
        self._queue(dist.irecv, received, self._rank_of_stage[stage - 1])
        self.pipe_buffers["inputs"][buffer_id] = received

    def _exec_send_grads(self, buffer_id: int, model_chunk_id: int) -> None:
        hidden, *others = _gradients(self.pipe_buffers["inputs"][buffer_id])
        self.pipe_buffers["inputs"][buffer_id] = None
        self._queue(
            dist.isend, (self._part(hidden), *others), self._rank_of_stage[self._stages[model_chunk_id] - 1]
        )

    def _exec_recv_grads(self, buffer_id: int, model_chunk_id: int) -> None:
        hidden, *others = (x for x in self.pipe_buffers["outputs"][buffer_id] if x.is_floating_point())
        received = (self._empty_part(hidden.shape, hidden.dtype), *map(torch.empty_like, others))
        self._queue(dist.irecv, received, self._rank_of_stage[self._stages[model_chunk_id] + 1])
        self.pipe_buffers["messages"][buffer_id] = received

    def _queue(self, operation: Callable, tensors: Tensors, rank: int) -> None:
        peer = self.grid.stage_to_global(rank)
        self._messages += [dist.P2POp(operation, x, peer, self._pipeline) for x in tensors]

    def _exec_commit_p2p(self) -> None:
        """Sends and receives the queued messages, and waits for them. If there are only sends, the next
        exchange waits for them."""
        self._wait_for_sends()
        messages, self._messages = self._messages, []
        self._sending = dist.batch_isend_irecv(messages), messages
        if any(message.op is dist.irecv for message in messages):
            self._wait_for_sends()

    def _wait_for_sends(self) -> None:
        for request in self._sending[0]:
            request.wait()
        self._sending = [], []  # frees the sent tensors

    _INSTRUCTION_MAP = {CommitP2P: _exec_commit_p2p, WeightGradPass: _exec_weight_grad_pass}


def _leaves(tensors: Iterable[Tensor]) -> Tensors:
    """Makes received tensors the inputs of a pass: activations require gradients, document ids do not."""
    return tuple(x.requires_grad_(x.is_floating_point()) for x in tensors)


def _gradients(inputs: Tensors) -> Tensors:
    """Returns the gradients of a stage's inputs, which the previous stage needs."""
    return tuple(x.grad for x in inputs if x.grad is not None)
