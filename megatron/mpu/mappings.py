"""The collectives of tensor and sequence parallelism as autograd functions (arXiv 1909.08053, 2205.05198).

Each docstring names the backward collective. If the group has one rank, these functions return their
argument.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.kernels.operators import first_order
from megatron.mpu.compilation import not_compiled
from megatron.mpu.mesh import Axis
from megatron.torch_versions import all_gather_single, reduce_scatter_single


def gather_from_tensor_region(x: torch.Tensor, tp_group: Axis, dim: int = -1) -> torch.Tensor:
    """All-gathers x along `dim`, from n / size elements per rank to n on all ranks. Backward: each rank takes
    its part."""
    return x if tp_group.size == 1 else _Gather.apply(x, tp_group, dim)


def scatter_to_sequence_region(x: torch.Tensor, tp_group: Axis) -> torch.Tensor:
    """Returns this rank's part [seq / size, ...] of a replicated [seq, ...]. Backward: all-gather."""
    return x if tp_group.size == 1 else _Scatter.apply(x, tp_group)


@not_compiled  # keeps the collectives as they are written
def gather_from_rank_block(x: torch.Tensor, tp_group: Axis, block: int) -> torch.Tensor:
    """All-gathers the last dimension over each block of `block` consecutive ranks, from [..., n] per rank to
    [..., block x n] on every rank of the block. Backward: the gradients are summed over the block's ranks,
    and each rank takes its part.

    The collectives run over the whole group, because blocks have no process groups of their own.
    """
    return x if block == 1 else _GatherBlock.apply(x, tp_group, block)


def reduce_scatter_to_sequence_region(x: torch.Tensor, tp_group: Axis) -> torch.Tensor:
    """Sums x [seq, ...] over the ranks, and returns this rank's part [seq / size, ...]. Backward:
    all-gather."""
    return x if tp_group.size == 1 else _ReduceScatter.apply(x, tp_group)


def copy_to_tensor_region(x: torch.Tensor, tp_group: Axis, sequence_parallel: bool) -> torch.Tensor:
    """Returns x [seq, ...] for a computation that differs between ranks. Backward: sums over the ranks.

    sequence_parallel: x is this rank's [seq / size, ...], and is first all-gathered. Backward:
    reduce-scatter.
    """
    return x if tp_group.size == 1 else _copy(x, tp_group, sequence_parallel)


@not_compiled
def _copy(x: torch.Tensor, tp_group: Axis, sequence_parallel: bool) -> torch.Tensor:
    return _Copy.apply(x, tp_group, sequence_parallel)


def all_gather_sequence(x: torch.Tensor, tp_group: Axis) -> tuple[torch.Tensor, dist.Work]:
    """Starts an all-gather of x [seq / size, ...]. The result [seq, ...] is complete after `wait()`. No
    autograd."""
    full = x.new_empty(x.shape[0] * tp_group.size, *x.shape[1:])
    return full, all_gather_single(full, x.contiguous(), group=tp_group.group, async_op=True)


def reduce_scatter_sequence(x: torch.Tensor, tp_group: Axis) -> tuple[torch.Tensor, dist.Work]:
    """Starts a reduce-scatter of x [seq, ...]. The result [seq / size, ...] is complete after `wait()`. No
    autograd. Raises ValueError if seq is not divisible by the group's size."""
    if x.shape[0] % tp_group.size != 0:
        raise ValueError(f"dimension 0 of {tuple(x.shape)} is not divisible by {tp_group.size} ranks")
    part = x.new_empty(x.shape[0] // tp_group.size, *x.shape[1:])
    return part, reduce_scatter_single(part, x.contiguous(), group=tp_group.group, async_op=True)


def all_reduce_(x: torch.Tensor, tp_group: Axis) -> torch.Tensor:
    """All-reduces a contiguous `x` in place. Nothing else may use `x`. No autograd."""
    if tp_group.size > 1:
        dist.all_reduce(x, group=tp_group.group)
    return x


def _all_gather(x: torch.Tensor, tp_group: Axis, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(tp_group.size)]
    dist.all_gather(parts, x.contiguous(), group=tp_group.group)
    return torch.cat(parts, dim)


@first_order
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: Axis, dim: int) -> torch.Tensor:
        ctx.tp_group, ctx.dim = tp_group, dim
        return _all_gather(x, tp_group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.chunk(ctx.tp_group.size, ctx.dim)[ctx.tp_group.rank].contiguous(), None, None


@first_order
class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: Axis) -> torch.Tensor:
        ctx.tp_group = tp_group
        return x.chunk(tp_group.size)[tp_group.rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(grad, ctx.tp_group, 0), None


@first_order
class _GatherBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: Axis, block: int) -> torch.Tensor:
        ctx.tp_group, ctx.block = tp_group, block
        every, pending = all_gather_sequence(x.unsqueeze(0), tp_group)  # [ranks, ..., n]
        pending.wait()
        return every[_block_of(tp_group, block)].movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        tp_group, block = ctx.tp_group, ctx.block
        parts = grad.unflatten(-1, (block, -1)).movedim(-2, 0)  # [block, ..., n]
        every = parts.new_zeros(tp_group.size, *parts.shape[1:])
        every[_block_of(tp_group, block)] = parts
        own, pending = reduce_scatter_sequence(every, tp_group)
        pending.wait()
        return own[0], None, None


def _block_of(tp_group: Axis, block: int) -> slice:
    """Returns the ranks of this rank's block, as a slice of the group's ranks."""
    first = tp_group.rank // block * block
    return slice(first, first + block)


@first_order
class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: Axis) -> torch.Tensor:
        ctx.tp_group = tp_group
        part, pending = reduce_scatter_sequence(x, tp_group)
        pending.wait()
        return part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        full, pending = all_gather_sequence(grad, ctx.tp_group)
        pending.wait()
        return full, None


@first_order
class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: Axis, sequence_parallel: bool) -> torch.Tensor:
        ctx.tp_group, ctx.sequence_parallel = tp_group, sequence_parallel
        if not sequence_parallel:
            return x.view_as(x)
        full, pending = all_gather_sequence(x, tp_group)
        pending.wait()
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.sequence_parallel:
            return all_reduce_(grad.clone(memory_format=torch.contiguous_format), ctx.tp_group), None, None
        part, pending = reduce_scatter_sequence(grad, ctx.tp_group)
        pending.wait()
        return part, None, None
