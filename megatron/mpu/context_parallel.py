"""Context parallelism: sequences are sharded over ranks, and attention all-gathers keys and values.

The idea (Llama 3, arXiv 2407.21783, section 3.3.2): each rank computes all layers for the tokens of its two
chunks (`sequence_chunks`). Only attention needs the tokens of other ranks. It all-gathers keys and values,
which are small with grouped queries, into the order of the sequence. Therefore any mask works, and each query
sums the same terms as in a single process.

If the group has one rank, which then holds whole sequences, the functions return their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.operators import first_order
from megatron.mpu.compilation import not_compiled
from megatron.mpu.mesh import Axis
from megatron.torch_versions import all_gather_single, reduce_scatter_single


def sequence_chunks(cp_group: Axis, seq: int) -> tuple[range, ...]:
    """Returns the positions of this rank's chunks in a sequence of `seq` tokens, in ascending order.

    A sequence is divided into 2 x CP equal chunks. Rank i holds the chunks i and 2 x CP - 1 - i, so that
    every rank computes equally much of causal attention. Raises ValueError if `seq` is not divisible by 2 x
    CP.
    """
    if cp_group.size == 1:
        return (range(seq),)
    if seq % (2 * cp_group.size):
        raise ValueError(f"{seq} tokens are not divisible by 2 x {cp_group.size} context-parallel ranks")
    width = seq // (2 * cp_group.size)
    indices = (cp_group.rank, 2 * cp_group.size - 1 - cp_group.rank)
    return tuple(range(index * width, (index + 1) * width) for index in indices)


def shard_sequence(x: Tensor, cp_group: Axis) -> Tensor:
    """Returns this rank's chunks of x [batch, seq, ...] as [batch, seq / CP, ...], without autograd."""
    if cp_group.size == 1:
        return x
    chunks = sequence_chunks(cp_group, x.shape[1])
    return torch.cat([x[:, chunk.start : chunk.stop] for chunk in chunks], dim=1)


def positions_of(cp_group: Axis, length: int, device: torch.device) -> Tensor:
    """Returns the positions in the sequence of this rank's `length` tokens, int64 [length]."""
    chunks = sequence_chunks(cp_group, length * cp_group.size)
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def tensor_shard(chunks: Sequence[range], tp_group: Axis) -> tuple[range, ...]:
    """Returns the positions of this tensor-parallel rank's shard of `chunks`. With --sequence-parallel the
    positions are divided into equal parts."""
    length = sum(map(len, chunks)) // tp_group.size
    first, shard = tp_group.rank * length, []
    for chunk in chunks:
        part = chunk[max(first, 0) : max(first + length, 0)]
        shard += [part] if part else []
        first -= len(chunk)
    return tuple(shard)


def gather_keys_and_values(key: Tensor, value: Tensor, cp_group: Axis) -> tuple[Tensor, Tensor]:
    """All-gathers key and value, each [seq / CP, ...], to [seq, ...] in the order of the sequence, on all
    ranks. The backward pass reduce-scatters. key and value must have equal shapes."""
    return (key, value) if cp_group.size == 1 else _GatherParts.apply(cp_group, key, value)


def gather_from_sequence(x: Tensor, cp_group: Axis) -> Tensor:
    """All-gathers one tensor, [seq / CP, ...], like `gather_keys_and_values`."""
    return x if cp_group.size == 1 else _gather(x, cp_group)


@not_compiled
def _gather(x: Tensor, cp_group: Axis) -> Tensor:
    return _GatherParts.apply(cp_group, x)[0]


def gather_sequence(x: Tensor, cp_group: Axis) -> Tensor:
    """All-gathers [batch, seq / CP, ...] to [batch, seq, ...] in the order of the sequence, without
    autograd."""
    return x if cp_group.size == 1 else _all_gather(x.transpose(0, 1), cp_group).transpose(0, 1)


@first_order
class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cp_group: Axis, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.cp_group = cp_group
        # The tensors are gathered in one collective, and the results are views of one tensor.
        return _all_gather(torch.stack(parts, dim=1), cp_group).unbind(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_reduce_scatter(grads, ctx.cp_group)


def _all_gather(x: Tensor, cp_group: Axis) -> Tensor:
    """All-gathers [seq / CP, ...] to [seq, ...] in the order of the sequence."""
    by_rank = x.new_empty(cp_group.size, 2, x.shape[0] // 2, *x.shape[1:])
    all_gather_single(by_rank.view(-1), x.contiguous().view(-1), group=cp_group.group)
    # The first chunks are ordered by ascending rank, the second chunks by descending rank.
    return torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0))).flatten(0, 1)


def _reduce_scatter(values: Sequence[Tensor], cp_group: Axis) -> Sequence[Tensor]:
    """Sums each tensor [seq, ...] over the ranks and returns this rank's chunks [seq / CP, ...]. The sums are
    fp32, since every addition in 16 bits would round."""
    shape, dtype = values[0].shape, values[0].dtype
    chunk = shape[0] // (2 * cp_group.size)
    by_rank = values[0].new_empty(cp_group.size, 2, chunk, len(values), *shape[1:], dtype=torch.float32)
    for index, value in enumerate(values):
        first, second = value.unflatten(0, (2, cp_group.size, chunk))
        by_rank[:, 0, :, index] = first
        by_rank[:, 1, :, index] = second.flip(0)
    own = by_rank.new_empty(2 * chunk, len(values), *shape[1:])
    reduce_scatter_single(own.view(-1), by_rank.view(-1), group=cp_group.group)
    return own.to(dtype).unbind(1)
