"""Embedding lookup with a deterministic gradient, which is summed in fp32 on every device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.kernels.embedding import fused_add_rows
from megatron.kernels.operators import first_order
from megatron.kernels.selection import uses_kernels
from megatron.mpu.parameters import has_main_grad, main_grad_of

# Size of an fp32 work buffer of the backward pass, in bytes. The backward pass allocates two.
WORK_BYTES = 32 * 2**20


def embedding(ids: torch.Tensor, weight: torch.Tensor, batch: int | None = None) -> torch.Tensor:
    """Returns weight[ids], [..., seq, hidden] in the dtype of weight [rows, hidden]. ids: int64 [..., seq].

    batch: if given, ids must be [1, seq], and the result is expanded to [batch, seq, hidden] as a view.

    If the optimizer has given `weight` a `main_grad`, the gradient is added to it in fp32, autograd gets
    None, and no temporary of the size of `weight` is allocated. Otherwise the gradient is summed in fp32 and
    returned in the dtype of `weight`. The sums are deterministic: they do not depend on the order of threads.
    """
    return _Embedding.apply(ids, weight, batch)


@first_order
class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        weight: torch.Tensor,
        batch: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        vectors = F.embedding(ids, weight)
        return vectors if batch is None else vectors.expand(batch, *vectors.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        # Only the rows of `ids` are written, so the values of all rows must be defined.
        total = main_grad_of(ctx.weight)
        if total is None:
            total = grad.new_zeros(ctx.weight.shape, dtype=torch.float32)
        if grad.shape[:-1] != ids.shape:
            grad = grad.sum(0, keepdim=True, dtype=torch.float32)
        _add_rows(total, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None if has_main_grad(ctx.weight) else total.to(ctx.weight.dtype), None


def _add_rows(total: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Computes total[ids[i]] += rows[i] for all i, in fp32, in a fixed order.

    On a GPU `index_add_` alone adds the rows of equal ids in an arbitrary order. Therefore the rows of each
    id are first summed in order. `index_add_` then adds this sum once per id, and zeros elsewhere. No size
    depends on the values of ids, so the host does not synchronize with the device.
    """
    if not ids.numel():
        return
    if uses_kernels(rows) and total.is_contiguous():
        fused_add_rows(total, ids, rows)
        return
    ids, order = ids.sort(stable=True)
    place = torch.arange(len(ids), device=ids.device)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]
    # Bag i holds all rows of an id if i is the id's first position in the sorted list. All other bags are
    # empty: they begin where the next bag begins.
    begins = torch.where(is_first, place, len(ids)).flip(0).cummin(0).values.flip(0)
    width = max(WORK_BYTES // (4 * len(ids)), 1)
    for first in range(0, rows.shape[1], width):
        part = rows[:, first : first + width].float().contiguous()
        sums = F.embedding_bag(order, part, begins, mode="sum")
        total[:, first : first + width].index_add_(0, ids, sums)
