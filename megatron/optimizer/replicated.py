"""Parameters that all tensor ranks hold alike, kept alike by force (--sync-tp-duplicated-parameters)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import spec_of
from megatron.optimizer.flat_group import FlatGroup


@torch.no_grad()
def average_replicated(groups: Sequence[FlatGroup], tp_group: TPGroup) -> None:
    """Gives what this rank owns of replicated parameters' master values the mean of all tensor ranks'.

    Tensor ranks cut their shards of equal sizes alike, so they own the same parts. One message, in fp64, in
    which the mean of equal values is that value. Collective.
    """
    parts = [
        flat.master[start : start + length]
        for flat in groups
        for parameter, start, length in flat.fragments()
        if spec_of(parameter).shard_dim is None
    ]
    if tp_group.size == 1 or not parts:
        return
    # Master values may be in the host's memory, messages are not.
    mean = torch.cat([part.double() for part in parts]).to(groups[0].weights.device)
    dist.all_reduce(mean, group=tp_group.group)
    mean /= tp_group.size
    for part, values in zip(parts, mean.split([part.numel() for part in parts]), strict=True):
        part.copy_(values)
