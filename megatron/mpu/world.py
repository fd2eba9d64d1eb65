"""Collectives over all ranks of a run."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

_Value = TypeVar("_Value")


def gather_from_all_ranks(value: _Value) -> list[_Value]:
    """Returns the values of all ranks, in rank order, on every rank; in a single process [value]. value: any
    Python object. It is a collective."""
    if not dist.is_initialized():
        return [value]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def broadcast_from_rank_0(value: _Value) -> _Value:
    """Returns rank 0's value on every rank. value: any Python object. It is a collective."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def max_over_ranks(value: int, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the largest `value` of all ranks, a scalar on `device`; in a single process `value` itself.

    It is a collective. It does not synchronize the host with the device; only reading the result does.
    """
    # The tensor is filled on the device: a copy from the host would synchronize the host with the device.
    largest = torch.full((), value, dtype=dtype, device=device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
