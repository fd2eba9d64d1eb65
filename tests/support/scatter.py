"""A tensor-parallel group of all ranks, and each rank's part of a tensor that is equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.mpu.mesh import Axis, Mesh


def world_tp_group() -> Axis:
    """Returns the tensor-parallel group of all ranks of the world."""
    size = dist.get_world_size()
    return Mesh.create(size, size, 1, dist.get_rank()).connect().tp


def scatter(x: torch.Tensor, tp_group: Axis, dim: int = -1) -> torch.Tensor:
    """Returns this rank's n / size of the replicated n elements along `dim`. The backward pass is an
    all-gather."""
    return x if tp_group.size == 1 else _Scatter.apply(x, tp_group, dim)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: Axis, dim: int) -> torch.Tensor:
        ctx.tp_group, ctx.dim = tp_group, dim
        return x.chunk(tp_group.size, dim)[tp_group.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = [torch.empty_like(grad) for _ in range(ctx.tp_group.size)]
        dist.all_gather(parts, grad.contiguous(), group=ctx.tp_group.group)
        return torch.cat(parts, ctx.dim), None, None
