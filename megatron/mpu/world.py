"""Collectives over all ranks of a run."""

from __future__ import annotations

import torch
import torch.distributed as dist


def largest_of_all_ranks(value: int, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """The largest `value` of all ranks, a scalar on `device`; `value` itself for a single process.

    Collective. Does not synchronize with the device; reading the result does.
    """
    # Filled on the device: a copy from the host would synchronize with it.
    largest = torch.full((), value, dtype=dtype, device=device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
