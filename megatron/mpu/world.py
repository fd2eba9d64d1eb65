"""Collectives over all ranks of a run."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

_Value = TypeVar("_Value")


def gather_from_all_ranks(value: _Value) -> list[_Value]:
    """Returns the values of all ranks, in rank order, on every rank; [value] in a single process. value: any
    Python object. Collective."""
    if not dist.is_initialized():
        return [value]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def broadcast_from_rank_0(value: _Value) -> _Value:
    """Returns rank 0's value on every rank. value: any Python object. Collective."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def max_over_ranks(value: int, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the largest `value` of all ranks, a scalar on `device`; `value` itself for a single process.

    Collective. It does not synchronize with the device; reading the result does.
    """
    # Filled on the device: a copy from the host would synchronize with it.
    largest = torch.full((), value, dtype=dtype, device=device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
