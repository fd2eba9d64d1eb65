"""Collectives of sequence parallelism that overlap with the matrix product beside them (--tp-comm-overlap).

A product after an all-gather is computed in chunks along the sequence: while the product of one chunk runs,
the next chunk is gathered. A product before a reduce-scatter: while a chunk is reduced, the product of the
next one runs. Only the first or the last chunk's communication is not hidden. (Megatron-LM's flag of this
name; arXiv 2305.06942 has the idea of decomposing both.)

A chunk holds a part of every rank's shard: rows [rank, chunk, row of the chunk, batch] of a full tensor
[seq, batch, ...]. So the reduced chunk, and the product of a gathered one, are at their places in the result
without a copy; the products are batched over the ranks, with the weight as a common factor. No sum over ranks
has other terms than without chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.layout import TPGroup
from megatron.mpu.mappings import all_gather_sequence

CHUNKS = 4
"""Most chunks of a shard. More chunks hide more, and their products are smaller."""


def number_of_chunks(length: int) -> int:
    """Chunks of a shard of `length` positions: the largest number up to `CHUNKS` that divides it."""
    return next(chunks for chunks in range(CHUNKS, 0, -1) if length % chunks == 0)


def gather_and_multiply(
    x: Tensor, factor: Tensor, bias: Tensor | None, tp_group: TPGroup, full: Tensor | None = None
) -> Tensor:
    """The product of the all-gathered `x` with `factor`, plus `bias`: [seq / size, batch, n_in] times
    [n_in, n_out] -> [seq, batch, n_out]. full: [seq, batch, n_in], gets the gathered `x`. No autograd."""
    chunks, batch = number_of_chunks(len(x)), x.shape[1:-1]
    result = x.new_empty(len(x) * tp_group.size, *batch, factor.shape[1])
    places = _blocks(result, chunks, tp_group)
    factor = factor.expand(tp_group.size, -1, -1)
    for index, part in enumerate(_gathered_chunks(x, chunks, tp_group)):
        rows = part.view(tp_group.size, -1, x.shape[-1])
        if bias is None:
            torch.bmm(rows, factor, out=places[:, index])
        else:
            torch.baddbmm(bias, rows, factor, out=places[:, index])
        if full is not None:
            _blocks(full, chunks, tp_group)[:, index].copy_(rows)
    return result


def multiply_and_reduce(x: Tensor, factor: Tensor, tp_group: TPGroup) -> Tensor:
    """This rank's shard of the sum over ranks of `x` times `factor`: [seq, batch, n_in] times [n_in, n_out]
    -> [seq / size, batch, n_out]. No autograd."""
    length = len(x) // tp_group.size
    chunks = number_of_chunks(length)
    result = x.new_empty(length, *x.shape[1:-1], factor.shape[1])
    factor = factor.expand(tp_group.size, -1, -1)
    pending = []
    for part, rows in zip(result.chunk(chunks), _blocks(x, chunks, tp_group).unbind(1), strict=True):
        partial = torch.bmm(rows, factor).view(tp_group.size * len(part), *part.shape[1:])
        pending.append(dist.reduce_scatter_tensor(part, partial, group=tp_group.group, async_op=True))
    for work in pending:
        work.wait()
    return result


def _gathered_chunks(x: Tensor, chunks: int, tp_group: TPGroup) -> Iterator[Tensor]:
    """The all-gathered chunks of `x`, in order; each next one is gathered while the caller uses one."""
    parts = x.contiguous().chunk(chunks)
    ahead = all_gather_sequence(parts[0], tp_group)
    for following in parts[1:]:
        part, pending = ahead
        ahead = all_gather_sequence(following, tp_group)
        pending.wait()
        yield part
    part, pending = ahead
    pending.wait()
    yield part


def _blocks(full: Tensor, chunks: int, tp_group: TPGroup) -> Tensor:
    """A view of a contiguous [seq, batch, n]: [rank, chunk, rows of the chunk x batch, n]."""
    return full.view(tp_group.size, chunks, -1, full.shape[-1])
