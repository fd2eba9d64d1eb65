"""Averages parameters that are replicated over tensor-parallel ranks (--sync-tp-duplicated-parameters)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import spec_of
from megatron.optimizer.flat_group import FlatGroup


@torch.no_grad()
def average_replicated(groups: Sequence[FlatGroup], tp_group: TPGroup) -> None:
    """Sets the master weights of replicated parameters to their mean over the tensor-parallel ranks.
    Collective.

    Flat buffers have the same layout on all tensor-parallel ranks, so their partitions hold the same
    elements. The mean is computed in fp64: the mean of equal values is then exactly that value.
    """
    parts = [
        flat.master[start : start + length]
        for flat in groups
        for parameter, start, length in flat.fragments()
        if spec_of(parameter).shard_dim is None
    ]
    if tp_group.size == 1 or not parts:
        return
    # Master weights may be in host memory (--cpu-offload); the all-reduce needs device memory.
    mean = torch.cat([part.double() for part in parts]).to(groups[0].weights.device)
    dist.all_reduce(mean, group=tp_group.group)
    mean /= tp_group.size
    for part, values in zip(parts, mean.split([part.numel() for part in parts]), strict=True):
        part.copy_(values)
