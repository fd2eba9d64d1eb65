"""Resharding: a tensor-parallel rank's shard of a parameter, from shards of another tensor-parallel size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import ParameterSpec, local_shape, local_slices


def reshard(
    spec: ParameterSpec,
    tp_group: TPGroup,
    saved: ParameterSpec,
    saved_size: int,
    saved_shard: Callable[[int], Tensor],
) -> Tensor:
    """This rank's shard, fp32, from those that `saved_size` tensor-parallel ranks saved.

    saved: the spec of the run that saved. It may differ in the padding of the vocabulary; padded rows become
    zeros. saved_shard: reads the shard of a tensor-parallel rank, of any shape. It is called only for shards
    that overlap with this rank's.
    """
    dim = spec.shard_dim
    target = torch.zeros(local_shape(spec, tp_group))
    used = spec.num_valid_rows if spec.num_valid_rows is not None else spec.global_shape[dim]
    for rank in range(saved_size):
        group = TPGroup(rank, saved_size)
        shard: Tensor | None = None
        for target_offset, mine in _with_offsets(local_slices(spec, tp_group)):
            for saved_offset, theirs in _with_offsets(local_slices(saved, group)):
                start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop, used)
                if start >= stop:
                    continue
                if shard is None:
                    shard = saved_shard(rank).view(local_shape(saved, group))
                source = shard.narrow(dim, saved_offset + start - theirs.start, stop - start)
                target.narrow(dim, target_offset + start - mine.start, stop - start).copy_(source)
    return target


def _with_offsets(slices: tuple[slice, ...]) -> list[tuple[int, slice]]:
    """Each slice of the global tensor with its offset in the shard, which is their concatenation."""
    offset, result = 0, []
    for part in slices:
        result.append((offset, part))
        offset += part.stop - part.start
    return result
