"""Rows of a table, whose gradient is summed in fp32 on every device and in the same order every time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# Of the fp32 work space that a backward pass takes twice.
WORK_BYTES = 32 * 2**20


def embedding(ids: torch.Tensor, weight: torch.Tensor, batch: int | None = None) -> torch.Tensor:
    """weight[ids]: ids int64 [..., seq] -> [..., seq, hidden] in the dtype of weight [rows, hidden].

    batch: the result of ids [1, seq] is for this many samples: [batch, seq, hidden], a view of one of them.

    The gradient of `weight` is added to its `main_grad` in fp32, where the run's optimizer has given it one,
    and autograd gets none; else it is summed in fp32 and has the dtype of `weight`. Nothing of the size of
    `weight` is made for that, and no sum depends on the order in which threads run.
    """
    return _Embedding.apply(ids, weight, getattr(weight, "main_grad", None), batch)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        weight: torch.Tensor,
        main_grad: torch.Tensor | None,
        batch: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.main_grad, ctx.shape, ctx.dtype = main_grad, weight.shape, weight.dtype
        vectors = F.embedding(ids, weight)
        return vectors if batch is None else vectors.expand(batch, *vectors.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        total = ctx.main_grad
        if total is None:
            total = grad.new_zeros(ctx.shape, dtype=torch.float32)
        if grad.shape[:-1] != ids.shape:
            grad = grad.sum(0, keepdim=True, dtype=torch.float32)
        _add_rows(total, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None if ctx.main_grad is not None else total.to(ctx.dtype), None, None


def _add_rows(total: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """total[ids[i]] += rows[i] for all i, in fp32; the rows of equal ids are summed first, in their order.

    `index_add_` alone would add them in any order on a GPU. Here it adds the sum once, and zeros, whose order
    does not matter. All sizes are known beforehand: the device is not waited for.
    """
    if not ids.numel():
        return
    ids, order = ids.sort(stable=True)
    place = torch.arange(len(ids), device=ids.device)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]
    # Bag i has the rows of an id if i is the first of them, else none: it begins where the next one does.
    begins = torch.where(is_first, place, len(ids)).flip(0).cummin(0).values.flip(0)
    width = max(WORK_BYTES // (4 * len(ids)), 1)
    for first in range(0, rows.shape[1], width):
        part = rows[:, first : first + width].float().contiguous()
        sums = F.embedding_bag(order, part, begins, mode="sum")
        total[:, first : first + width].index_add_(0, ids, sums)
