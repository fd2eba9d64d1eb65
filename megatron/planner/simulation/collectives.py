"""Reads the arguments of PyTorch's c10d operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.planner.simulation.record import CollectiveCall

POINT_TO_POINT = ("send", "recv_")


def describe_call(name: str, args: tuple) -> CollectiveCall | None:
    """The call of the c10d operation `name`; None for operations that exchange no tensors."""
    lists = [_flat(argument) for argument in args]
    # The longest list of tensors is the full tensor: the output of an all-gather, the input of a
    # reduce-scatter.
    full = max(lists, key=lambda tensors: sum(x.numel() for x in tensors), default=[])
    if not full:
        return None
    elements = sum(x.numel() for x in full)
    ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group_of(args)))
    ranks = (ranks[int(args[2])],) if name in POINT_TO_POINT else tuple(sorted(ranks))
    return CollectiveCall(
        name, ranks, str(full[0].dtype).removeprefix("torch."), elements, elements * full[0].element_size()
    )


def _flat(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [x for part in argument for x in _flat(part)]
    return []


def group_of(args: tuple) -> dist.ProcessGroup:
    """The process group among the arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            name = dist.ProcessGroup.unbox(argument).group_name
            return dist.distributed_c10d._resolve_process_group(name)
    raise ValueError("a collective call without a process group")


def communicator_of(name: str, args: tuple) -> tuple[str, int | None] | None:
    """What NCCL keeps a communicator for: (name of the process group, None), or for a message outside a batch
    (name, the other rank). None for a group of one rank, which needs no buffers. name: of the operation.

    Messages of the default group are sent one at a time, those of other groups in batches
    (`engine.executor`).
    """
    group = group_of(args)
    if dist.get_world_size(group) == 1:
        return None
    alone = name in POINT_TO_POINT and group == dist.group.WORLD
    return group.group_name, int(args[2]) if alone else None
