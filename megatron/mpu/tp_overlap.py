"""Collectives of sequence parallelism that overlap with the matrix product beside them (--tp-comm-overlap).

A product after an all-gather is computed in chunks along the sequence: while the product of one chunk runs,
the next chunk is gathered. A product before a reduce-scatter: while a chunk is reduced, the product of the
next one runs. Only the first or the last chunk's communication is not hidden. Megatron-LM has a flag of this
name.

A chunk holds a part of every rank's shard: rows [rank, chunk, row of the chunk, batch] of a full tensor
[seq, batch, ...]. So the reduced chunk, and the product of a gathered one, are at their places in the result
without a copy (but cuBLAS copies a bias into the result of a batched product first); the products are batched
over the ranks, with the weight as a common factor. No sum over ranks has other terms than without chunks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.layout import TPGroup


def number_of_chunks(length: int, most: int) -> int:
    """Chunks of a shard of `length` positions: the largest number up to `most` that divides it."""
    return next(chunks for chunks in range(most, 0, -1) if length % chunks == 0)


def gather_and_multiply(
    x: Tensor, factor: Tensor, bias: Tensor | None, tp_group: TPGroup, most_chunks: int
) -> tuple[Tensor, Tensor]:
    """(product of the all-gathered `x` with `factor`, plus `bias`; the gathered `x`, chunk after chunk):
    [seq / size, batch, n_in] times [n_in, n_out] -> [seq, batch, n_out], [chunk, rank, rows, n_in]. No
    autograd."""
    chunks = number_of_chunks(len(x), most_chunks)
    gathered = x.new_empty(chunks, tp_group.size, x[..., 0].numel() // chunks, x.shape[-1])
    result = x.new_empty(len(x) * tp_group.size, *x.shape[1:-1], factor.shape[1])
    parts = x.contiguous().view(chunks, -1, x.shape[-1]).unbind()
    factor = factor.expand(tp_group.size, -1, -1)
    pending = _start_gather(gathered[0], parts[0], tp_group)
    for index, place in enumerate(_blocks(result, chunks, tp_group).unbind(1)):
        current = pending
        if index + 1 < chunks:
            pending = _start_gather(gathered[index + 1], parts[index + 1], tp_group)
        current.wait()
        if bias is None:
            torch.bmm(gathered[index], factor, out=place)
        else:
            torch.baddbmm(bias, gathered[index], factor, out=place)
    return result, gathered


def _start_gather(full: Tensor, part: Tensor, tp_group: TPGroup) -> dist.Work:
    return dist.all_gather_into_tensor(full.flatten(0, 1), part, group=tp_group.group, async_op=True)


def in_chunks(x: Tensor, chunks: int, tp_group: TPGroup) -> Tensor:
    """The rows of a contiguous [seq, batch, n] in the order of `gather_and_multiply`'s second result:
    [seq x batch, n]. A copy if there are several chunks."""
    return _blocks(x, chunks, tp_group).transpose(0, 1).reshape(-1, x.shape[-1])


def multiply_and_reduce(x: Tensor, factor: Tensor, tp_group: TPGroup, most_chunks: int) -> Tensor:
    """This rank's shard of the sum over ranks of `x` times `factor`: [seq, batch, n_in] times [n_in, n_out]
    -> [seq / size, batch, n_out]. No autograd."""
    length = len(x) // tp_group.size
    chunks = number_of_chunks(length, most_chunks)
    result = x.new_empty(length, *x.shape[1:-1], factor.shape[1])
    factor = factor.expand(tp_group.size, -1, -1)
    pending = []
    for part, rows in zip(result.chunk(chunks), _blocks(x, chunks, tp_group).unbind(1), strict=True):
        partial = torch.bmm(rows, factor).view(tp_group.size * len(part), *part.shape[1:])
        pending.append(dist.reduce_scatter_tensor(part, partial, group=tp_group.group, async_op=True))
    for work in pending:
        work.wait()
    return result


def _blocks(full: Tensor, chunks: int, tp_group: TPGroup) -> Tensor:
    """A view of a contiguous [seq, batch, n]: [rank, chunk, rows of the chunk x batch, n]."""
    return full.view(tp_group.size, chunks, -1, full.shape[-1])
