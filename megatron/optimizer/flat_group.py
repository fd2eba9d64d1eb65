"""Flat buffers for the parameters of an optimizer group, partitioned over the data-parallel ranks (ZeRO).

The idea (ZeRO, arXiv 1910.02054): the parameters of a group lie one after the other in a flat buffer, and
their gradients in a second flat buffer. Each buffer is divided into equal partitions, one per data-parallel
rank. A rank updates only its own partition, so it keeps fp32 master weights and optimizer state only for this
partition. Partitions ignore parameter boundaries; `FlatGroup.fragment` returns a parameter's part of the
partition.

A group has full weights in the run's precision, and full gradients in fp32. It also has this rank's partition
of both, and this rank's partition of the fp32 master weights. The ZeRO stage decides when the full buffers
are allocated:

    ZeRO 0    full weights and gradients always; the partition is the whole buffer
    ZeRO 1    full weights and gradients always; the partition is a view of them. At the end of a step the
              gradients are reduce-scattered; only the partition then has the sum over the replicas
    ZeRO 2    full gradients of a transformer layer only during its backward pass: at its end they are
              reduce-scattered into the partitions
    ZeRO 3    as ZeRO 2, and full weights of a transformer layer only during its forward and backward pass:
              they are all-gathered before each pass

A full buffer is freed by resizing its storage to zero. Views of the buffer stay valid objects, including
tensors that autograd saved for the backward pass. They have their contents again as soon as the storage is
allocated and filled. The hooks in `megatron.optimizer.overlap` free and fill the buffers around each layer.

Invariant: parameters are views of the full weights while these are allocated; otherwise they are NaN
(`without_memory`), because a read of freed memory would kill the process. Full gradients are the parameters'
`main_grad` only if they are always allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron.kernels.optimizer import copy_gradient_op
from megatron.kernels.selection import uses_kernels
from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import (
    is_tp_replicated,
    main_grad_of,
    mark_main_grad,
    next_main_grad,
    set_main_grad,
    without_memory,
)
from megatron.optimizer.quantized import BLOCK_SIZE, QuantizedMoment, read_moment
from megatron.torch_versions import all_gather_single, reduce_scatter_single

# A partition's length is a multiple of this many elements, which are 64 bytes of fp32: the widest vector
# registers. With other lengths PyTorch's fused optimizers compute the last elements one by one, and round
# differently. The replicas of a tied weight, which without ZeRO lie at different offsets of their buffers,
# would then diverge.
ALIGNMENT = 16
# A parameter begins at a multiple of this many elements, which are 128 bytes in 16 bits. Otherwise, matrices
# that follow a matrix of odd size would not be aligned to 16 bytes, and cuBLAS and Triton have slower kernels
# for them. The sizes of usual models are multiples of this number.
PARAMETER_ALIGNMENT = 64


class _Complete:
    """Stands for the pending work of a collective in a group of one rank."""

    def wait(self) -> None:
        """Does nothing, because nothing is pending."""


Pending = dist.Work | _Complete


class FlatGroup:
    """The parameters of one optimizer group as views of flat buffers, divided into equal partitions.

    Parameters start at multiples of PARAMETER_ALIGNMENT. With 8-bit moments (`quantized`) parameters and
    partitions start at multiples of the quantization block. So no block holds elements of two parameters or
    of two ranks, and the blocks of a parameter depend only on its tensor-parallel shard. Pipeline stages,
    replicas and ZeRO do not change any 8-bit code. The padding between parameters has no gradient and is not
    saved.
    """

    def __init__(
        self,
        group: dict[str, Any],
        axis: Axis,
        is_partitioned: bool,
        *,
        shards_gradients: bool = False,
        initial_values: Callable[[nn.Parameter, range], Tensor] | None = None,
        master_on_host: bool = False,
    ) -> None:
        """axis: the ranks that reduce the gradients. is_partitioned: whether each of these ranks holds a
        partition. shards_gradients: whether the full gradients are allocated only while they are in use.
        initial_values: if given, the full weights are also allocated only while they are in use, and the
        parameters have no memory yet; the function returns a range of a parameter's elements (fp32, on the
        host). master_on_host: whether master weights and optimizer state are kept in host memory
        (--cpu-offload)."""
        partitions = axis.size if is_partitioned else 1
        self.parameters: list[nn.Parameter] = list(group["params"])
        self.moment_bits: int = group.get("moment_bits", 32)
        self.unit: str | None = group.get("unit")
        self.matrices: bool = group.get("matrices", False)
        self.shards_gradients, self.shards_weights = shards_gradients, initial_values is not None
        alignment = BLOCK_SIZE if self.quantized else PARAMETER_ALIGNMENT
        aligned = (BLOCK_SIZE if self.quantized else ALIGNMENT) * partitions
        self.offsets: dict[nn.Parameter, int] = {}
        """Index of each parameter's first element in the full buffers."""
        offset = 0
        for parameter in self.parameters:
            self.offsets[parameter] = math.ceil(offset / alignment) * alignment
            offset = self.offsets[parameter] + parameter.numel()
        length = math.ceil(offset / aligned) * aligned
        first = self.parameters[0]
        self.partitions, self.axis = partitions, axis
        self.size = length // partitions
        self.start = axis.rank * self.size if is_partitioned else 0
        # Weights come before gradients, because the parameters' original memory is freed in between.
        self.weights = torch.zeros(length, dtype=first.dtype, device=first.device)
        views = [self._part(self.weights, p).view_as(p) for p in self.parameters]
        # The list is made only once, because the hooks of each layer assign its views.
        self._full_params = list(zip(self.parameters, views, strict=True))
        self._freed_params = []
        if initial_values is None:
            for parameter, view in self._full_params:
                view.copy_(parameter.data)
                parameter.data = view
        else:
            self._freed_params = [(p, without_memory(p)) for p in self.parameters]
        self.local_weights = self._own_part(self.weights)
        if initial_values is not None:
            self.free_full_params()
            self.local_weights = self._make_local_weights(initial_values)
        self.gradients = torch.zeros(length, dtype=torch.float32, device=first.device)
        self.full_grads = [self.full_grad(p).view_as(p) for p in self.parameters]
        for parameter, total in (
            () if shards_gradients else zip(self.parameters, self.full_grads, strict=True)
        ):
            set_main_grad(parameter, total)
        self.local_gradients = self._own_part(self.gradients)
        if shards_gradients:
            self.local_gradients = torch.zeros_like(self.local_gradients)
            _free_storage(self.gradients)
        self._shard_beta = 1.0
        # Autograd accumulates fp32 gradients directly in the flat buffer: it always adds, and never
        # overwrites.
        self._always_adds = first.dtype == torch.float32 and not shards_gradients
        # For each parameter, the norm of this rank's gradients before the reduction, to diagnose a non-finite
        # gradient. With `shards_gradients` an entry shows only whether the gradients were finite. Entries are
        # 16 bytes apart: Triton would compile a second kernel for addresses that are not multiples of 16.
        self.reduced_grad_norms = self.gradients.new_zeros(len(self.parameters), 2, dtype=torch.float64)[:, 0]
        # In fp32 the weights are also the master weights; there is no second copy.
        self.weights_are_master = first.dtype == torch.float32 and not master_on_host
        self.host_gradients: Tensor | None = None
        if master_on_host:
            # Copies between pinned memory and the device, within one dtype, do not block the host.
            pin = get_accelerator().pin_memory
            self.host_weights = pin(self.local_weights.to("cpu", copy=True))
            # The host's allocator rounds pinned memory up to a power of two, so only buffers that are copied
            # are pinned.
            master = self.host_weights.float() if first.dtype != torch.float32 else self.host_weights
            self.host_gradients = pin(torch.zeros_like(master))
        else:
            master = self.local_weights if self.weights_are_master else self.local_weights.float()
        self.master = nn.Parameter(master.detach())

    def _part(self, full: Tensor, parameter: nn.Parameter) -> Tensor:
        """Returns the parameter's part of a full buffer as a flat view."""
        return full[self.offsets[parameter] : self.offsets[parameter] + parameter.numel()]

    def first_element(self, parameter: nn.Parameter, start: int = 0) -> int:
        """Returns the index, within the flattened parameter, of its first element that lies at or after
        element `start` of this rank's partition."""
        return max(self.start + start - self.offsets[parameter], 0)

    def _make_local_weights(self, initial_values: Callable[[nn.Parameter, range], Tensor]) -> Tensor:
        """Returns this rank's partition of the initial weights. It is filled one parameter at a time; padding
        is zero."""
        weights = torch.zeros(self.size, dtype=self.weights.dtype, device=self.weights.device)
        for parameter, start, length in self.fragments():
            offset = self.first_element(parameter)
            weights[start : start + length].copy_(initial_values(parameter, range(offset, offset + length)))
        return weights

    @property
    def quantized(self) -> bool:
        """Whether the moments of these parameters are stored in 8 bits."""
        return self.moment_bits == 8

    def _own_part(self, full: Tensor) -> Tensor:
        """Returns this rank's partition of a full buffer, as a view."""
        return full[self.start : self.start + self.size]

    def fragment(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Returns (start, length) of the parameter's elements in this rank's partition, or None if it has
        none."""
        offset = self.offsets[parameter]
        begin, end = max(offset, self.start), min(offset + parameter.numel(), self.start + self.size)
        return (begin - self.start, end - begin) if begin < end else None

    def spans(self, parameter: nn.Parameter) -> dict[int, tuple[int, int]]:
        """Returns (first element, end) of the parameter's elements in each partition that has some, by
        partition."""
        offset, length = self.offsets[parameter], parameter.numel()
        held = range(offset // self.size, (offset + length - 1) // self.size + 1)
        return {
            partition: (
                max(partition * self.size - offset, 0),
                min((partition + 1) * self.size - offset, length),
            )
            for partition in held
        }

    def fragments(self) -> list[tuple[nn.Parameter, int, int]]:
        """Returns (parameter, start, length) for each parameter with elements in this rank's partition, in
        order."""
        owned = [(parameter, self.fragment(parameter)) for parameter in self.parameters]
        return [(parameter, *fragment) for parameter, fragment in owned if fragment is not None]

    def without_padding(self, values: Tensor | QuantizedMoment) -> Tensor:
        """Returns the partition's values in fp32 without the padding between parameters. Without padding it
        is a view. Otherwise it is a copy on the CPU, made one parameter at a time to save device memory."""
        fragments = self.fragments()
        lengths = [length for _, _, length in fragments]
        if isinstance(values, Tensor) and fragments[-1:] and sum(fragments[-1][1:]) == sum(lengths):
            return values[: sum(lengths)]
        result = torch.empty(sum(lengths), dtype=torch.float32)
        for (_, start, length), part in zip(fragments, result.split(lengths), strict=True):
            part.copy_(read_moment(values, start, length))
        return result

    # --- weights ---

    @property
    def rounded_weights(self) -> Tensor | None:
        """This rank's partition of the weights, to which an optimizer may write the rounded master weights.
        None if `copy_master_to_params` has to do more than to round them."""
        return None if self.weights_are_master or self.host_gradients is not None else self.local_weights

    @property
    def has_full_params(self) -> bool:
        """Whether the full weights are allocated."""
        return self.weights.untyped_storage().nbytes() > 0

    def copy_master_to_params(self) -> None:
        """Rounds the master weights to the run's precision, and writes them to this rank's partition of the
        weights."""
        if self.host_gradients is not None:
            if self.host_weights.dtype != torch.float32:
                self.host_weights.copy_(self.master.detach())
            self.local_weights.copy_(self.host_weights, non_blocking=True)
        elif not self.weights_are_master:
            self.local_weights.copy_(self.master.detach())

    def all_gather_params(self) -> Pending:
        """Starts the all-gather of the full weights, which is complete after `wait()`. It is a collective."""
        own = self.local_weights
        if self.shards_weights:
            _alloc_storage(self.weights)
            for parameter, view in self._full_params:
                parameter.data = view
        if self.axis.size == 1:
            if self.shards_weights:
                self.weights.copy_(own)
            return _Complete()
        if not self.shards_weights and dist.get_backend(self.axis.group) == dist.Backend.GLOO:
            own = own.clone()  # gloo does not support an input that overlaps the output
        # Tensors that autograd saved stay valid, because a parameter does not share the buffer's version
        # counter.
        return all_gather_single(self.weights, own, group=self.axis.group, async_op=True)

    def free_full_params(self) -> None:
        """Frees the full weights. This rank's partition stays allocated."""
        _free_storage(self.weights)
        for parameter, freed in self._freed_params:
            parameter.data = freed

    # --- gradients ---

    def zero_gradients(self) -> None:
        """Sets the accumulated gradients to zero, so that every gradient of the next step is added to
        them."""
        (self.local_gradients if self.shards_gradients else self.gradients).zero_()
        self.reduced_grad_norms.zero_()
        self.mark_gradients(are_defined=True)

    def forget_gradients(self) -> None:
        """Declares the accumulated gradients undefined, without a pass over memory: the first gradient of
        each parameter in the next step overwrites them."""
        if self._always_adds:
            self.zero_gradients()
            return
        self.reduced_grad_norms.zero_()
        self.mark_gradients(are_defined=False)

    def mark_gradients(self, are_defined: bool) -> None:
        """Declares the accumulated gradients defined or undefined."""
        self._shard_beta = float(are_defined)
        for parameter in () if self.shards_gradients else self.parameters:
            mark_main_grad(parameter, are_defined)

    def complete_gradients(self) -> None:
        """Sets all gradients to zero that no micro-batch has written in this step."""
        if not self.shards_gradients:
            for parameter in self.parameters:
                main_grad_of(parameter)
        elif self._shard_beta == 0.0:
            self.local_gradients.zero_()
            self._shard_beta = 1.0

    def alloc_full_grads(self) -> None:
        """Allocates the full gradients, with `shards_gradients`. Only their padding is set to zero, because
        each gradient is copied into them."""
        _alloc_storage(self.gradients)
        ends = [offset + parameter.numel() for parameter, offset in self.offsets.items()]
        for end, start in zip(ends, [*self.offsets.values(), len(self.gradients)][1:], strict=True):
            if end < start:
                self.gradients[end:start].zero_()

    def reduce_scatter_grads(self) -> Pending:
        """Starts the reduce-scatter of the full gradients. After `wait()` this rank's partition holds the sum
        over the replicas, and the rest is undefined. It is a collective."""
        if self.axis.size == 1:
            return _Complete()
        if prefers_all_reduce(self.axis.group):
            return dist.all_reduce(self.gradients, group=self.axis.group, async_op=True)
        return reduce_scatter_single(
            self._own_part(self.gradients), self.gradients, group=self.axis.group, async_op=True
        )

    def accumulate_grad_shard(self) -> None:
        """Adds the result of `reduce_scatter_grads` to the partition's gradient, and frees the full
        gradients. It is used only with `shards_gradients`."""
        _add(self.local_gradients, self._own_part(self.gradients), self._shard_beta)
        self._shard_beta = 1.0
        _free_storage(self.gradients)

    def full_grad(self, parameter: nn.Parameter) -> Tensor:
        """Returns the parameter's gradient in the full buffer as a flat view."""
        return self._part(self.gradients, parameter)

    def owned_grad(self, parameter: nn.Parameter) -> Tensor:
        """Returns the gradient of the parameter's elements in this rank's partition, as a flat view, which
        may be empty. Without ZeRO it is the whole gradient."""
        start, length = self.fragment(parameter) or (0, 0)
        return self.local_gradients[start : start + length]

    def set_master_grad(self, factor: float) -> None:
        """Sets the gradient of the master weights to the partition's gradient times `factor`. With
        `master_on_host` it must be read only after `wait_for_copies`."""
        if factor != 1.0:
            self.local_gradients.mul_(factor)
        if self.host_gradients is not None:
            self.host_gradients.copy_(self.local_gradients, non_blocking=True)
        self.master.grad = self.local_gradients if self.host_gradients is None else self.host_gradients


def add_to_main_grad(parameter: Tensor) -> None:
    """Adds a micro-batch's gradient to the fp32 sum and frees it. It is a hook of the parameter. If `grad` is
    None, the fused loss has already added the head's gradient to the sum."""
    gradient = parameter.grad  # read once, since each access takes 1 us of host time
    if gradient is not None:
        total, beta = next_main_grad(parameter)
        _add(total, gradient, beta)
        parameter.grad = None


def _add(total: Tensor, gradient: Tensor, beta: float) -> None:
    """Computes total = beta * total + gradient. beta: 0 or 1; with 0 `total` is not read."""
    if beta == 0.0:
        total.copy_(gradient)
    else:
        total.add_(gradient)


def move_grad(parameter: Tensor, total: Tensor, norm: Tensor) -> None:
    """Copies a micro-batch's gradient to `total`, which has no value yet, and frees the gradient. If the
    gradient is not finite, it sets `norm`, an fp64 scalar, to a non-finite value. With kernels this needs no
    second pass over memory."""
    gradient = parameter.grad
    assert gradient is not None  # the hook is called only after the gradient is set
    if uses_kernels(gradient) and gradient.is_contiguous():
        copy_gradient_op(gradient, total, norm)
    else:
        total.copy_(gradient)
        norm += torch.linalg.vector_norm(gradient, torch.inf)
    parameter.grad = None


def wait_for_copies(groups: Sequence[FlatGroup]) -> None:
    """Waits once until all copies of `groups` between device and host memory have ended: gradients to the
    host, and weights to the device."""
    accelerator = get_accelerator()
    on_host = any(group.host_gradients is not None for group in groups)
    if on_host and not accelerator.is_synchronized_device():
        event = accelerator.Event()
        event.record()
        event.synchronize()


def prefers_all_reduce(group: dist.ProcessGroup | None) -> bool:
    """Returns whether to use an all-reduce instead of a reduce-scatter. With gloo both give equal bits, but a
    reduce-scatter takes several times as long."""
    return dist.get_backend(group) == dist.Backend.GLOO


def is_host_memory(device: torch.device) -> bool:
    """Returns whether tensors on this device are in host memory."""
    return device.type == "cpu"


def _free_storage(flat: Tensor) -> None:
    flat.untyped_storage().resize_(0)


def _alloc_storage(flat: Tensor) -> None:
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


@torch.no_grad()
def average_replicated(groups: Sequence[FlatGroup], tp_group: Axis) -> set[FlatGroup]:
    """Averages the master weights of replicated parameters over the tensor-parallel ranks. It returns the
    groups that have such parameters, and is a collective.

    Flat buffers have the same layout on all tensor-parallel ranks, so their partitions hold the same
    elements. The mean is computed in fp64, so the mean of equal values is exactly this value.
    """
    held = [
        (flat, flat.master[start : start + length])
        for flat in groups
        for parameter, start, length in flat.fragments()
        if is_tp_replicated(parameter)
    ]
    if tp_group.size == 1 or not held:
        return set()
    parts = [part for _, part in held]
    # Master weights may be in host memory (--cpu-offload); the all-reduce needs device memory.
    mean = torch.cat([part.double() for part in parts]).to(groups[0].weights.device)
    dist.all_reduce(mean, group=tp_group.group)
    mean /= tp_group.size
    for part, values in zip(parts, mean.split([part.numel() for part in parts]), strict=True):
        part.copy_(values)
    return {flat for flat, _ in held}
