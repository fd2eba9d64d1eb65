"""The collectives of tensor parallelism as autograd functions.

Each says what happens to an activation in the forward pass; its backward pass does the matching thing to the
gradient. In a group of one, all of them return their argument itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.mpu.layout import TensorGroup


def copy_to_tensor_region(x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """A replicated `x` goes into layers of which each rank has a part. The gradients are summed."""
    return x if tensor.size == 1 else _Copy.apply(x, tensor)


def reduce_from_tensor_region(x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """Sum over the ranks of `x`; every rank gets the same result. The gradient passes unchanged."""
    return x if tensor.size == 1 else _Reduce.apply(x, tensor)


def gather_from_tensor_region(x: torch.Tensor, tensor: TensorGroup, dim: int = -1) -> torch.Tensor:
    """Along `dim`, n / size of each rank -> n on all. Each rank keeps its own part of the gradient."""
    return x if tensor.size == 1 else _Gather.apply(x, tensor, dim)


def scatter_to_tensor_region(x: torch.Tensor, tensor: TensorGroup, dim: int = -1) -> torch.Tensor:
    """A replicated n along `dim` -> this rank's n / size. The gradients of all ranks are gathered."""
    return x if tensor.size == 1 else _Scatter.apply(x, tensor, dim)


def sum_and_scatter_sequence(x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """[seq, ...] of each rank -> of their sum this rank's [seq / size, ...]. The gradients are gathered."""
    return x if tensor.size == 1 else _SumAndScatter.apply(x, tensor)


def all_of_sequence(x: torch.Tensor, tensor: TensorGroup) -> tuple[torch.Tensor, dist.Work]:
    """Starts gathering [seq / size, ...] of each rank into [seq, ...], ready after `wait()`. No autograd."""
    whole = x.new_empty(x.shape[0] * tensor.size, *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), group=tensor.group, async_op=True)


def part_of_summed_sequence(x: torch.Tensor, tensor: TensorGroup) -> tuple[torch.Tensor, dist.Work]:
    """Starts summing [seq, ...] over the ranks; this rank's [seq / size, ...] is ready after `wait()`. No
    autograd. ValueError if the sequence cannot be cut."""
    part = x.new_empty(_width_of_part(x, tensor, 0), *x.shape[1:])
    return part, dist.reduce_scatter_tensor(part, x.contiguous(), group=tensor.group, async_op=True)


def sum_in_place(x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """Overwrite a contiguous `x`, which the caller must own, with its sum over the ranks. No autograd."""
    if tensor.size > 1:
        dist.all_reduce(x, group=tensor.group)
    return x


def _sum(x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    # A clone, since autograd may hand the same gradient tensor to others, and an input is the caller's.
    return sum_in_place(x.clone(memory_format=torch.contiguous_format), tensor)


def _all_parts(x: torch.Tensor, tensor: TensorGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(tensor.size)]
    dist.all_gather(parts, x.contiguous(), group=tensor.group)
    return torch.cat(parts, dim)


def _own_part(x: torch.Tensor, tensor: TensorGroup, dim: int) -> torch.Tensor:
    width = _width_of_part(x, tensor, dim)
    return x.narrow(dim, tensor.rank * width, width).contiguous()


def _width_of_part(x: torch.Tensor, tensor: TensorGroup, dim: int) -> int:
    if x.shape[dim] % tensor.size != 0:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} cannot be cut into {tensor.size} parts")
    return x.shape[dim] // tensor.size


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
        ctx.tensor = tensor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.tensor), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
        return _sum(x, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: TensorGroup, dim: int) -> torch.Tensor:
        ctx.tensor, ctx.dim = tensor, dim
        return _all_parts(x, tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_part(grad, ctx.tensor, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: TensorGroup, dim: int) -> torch.Tensor:
        ctx.tensor, ctx.dim = tensor, dim
        return _own_part(x, tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_parts(grad, ctx.tensor, ctx.dim), None, None


class _SumAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
        ctx.tensor = tensor
        part, pending = part_of_summed_sequence(x, tensor)
        pending.wait()
        return part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole, pending = all_of_sequence(grad, ctx.tensor)
        pending.wait()
        return whole, None
