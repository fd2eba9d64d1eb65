"""Reads the arguments of PyTorch's c10d operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.simulation.record import CollectiveCall

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
    ranks = (int(args[2]),) if name in POINT_TO_POINT else _ranks_of(args)
    return CollectiveCall(
        name, ranks, str(full[0].dtype).removeprefix("torch."), elements, elements * full[0].element_size()
    )


def _flat(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [x for part in argument for x in _flat(part)]
    return []


def _ranks_of(args: tuple) -> tuple[int, ...]:
    """Global ranks of the process group among the arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            name = dist.ProcessGroup.unbox(argument).group_name
            group = dist.distributed_c10d._resolve_process_group(name)
            return tuple(sorted(dist.get_process_group_ranks(group)))
    raise ValueError("a collective call without a process group")
