"""Runs a script whose ranks share one GPU: collectives copy tensors to host memory and use gloo.

NCCL rejects two ranks on one GPU ("Duplicate GPU detected"), and gloo does not send tensors of a GPU to
another rank. This program replaces functions of torch.distributed with functions that copy a tensor to
host memory, call gloo, and copy the result back. The script sees the backend 'nccl', so it takes the code
paths of NCCL (reduce-scatter, all-gather into a view). This tests the results: nothing overlaps, and times
mean nothing.

    RANK=0 WORLD_SIZE=2 ... python -m tests.support.shared_gpu pretrain_gpt.py FLAGS      as each rank

STAGE_HOST_TENSORS=1 also copies tensors that are in host memory. With it this file is tested on CPUs.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Function = Callable[..., Any]


class Ended:
    """The handle of a finished collective or of sends. It keeps the copies until they are sent."""

    def __init__(self, work: Any = None, copy: Tensor | None = None) -> None:
        self._work, self._copy = work, copy

    def wait(self, *_: Any) -> bool:
        if self._work is not None:
            self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def is_staged(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or os.environ.get("STAGE_HOST_TENSORS") == "1"


def to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def empty_on_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def copy_back(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        tensor.detach().copy_(values.view_as(tensor))


def in_place(original: Function) -> Function:
    """Wraps all_reduce, broadcast, reduce or recv: the first argument is read and written."""

    def staged(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not is_staged(tensor):
            return original(tensor, *args, **kwargs, **({"async_op": True} if async_op else {}))
        copy = to_host(tensor)
        result = original(copy, *args, **kwargs)
        copy_back(tensor, copy)
        return Ended() if async_op else result

    return staged


def into_output(original: Function) -> Function:
    """Wraps an all-gather or reduce-scatter of one tensor: the first argument is written, the second is
    read."""

    def staged(output: Tensor, given: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not is_staged(given):
            return original(output, given, *args, async_op=async_op, **kwargs)
        copy = empty_on_host(output)
        original(copy, to_host(given), *args, **kwargs)
        copy_back(output, copy)
        return Ended() if async_op else None

    return staged


def into_list(original: Function) -> Function:
    """Wraps all_gather: the tensors of the first argument are written, the second argument is read."""

    def staged(
        outputs: list[Tensor], given: Tensor, *args: Any, async_op: bool = False, **kwargs: Any
    ) -> Any:
        if not is_staged(given):
            return original(outputs, given, *args, async_op=async_op, **kwargs)
        copies = [empty_on_host(output) for output in outputs]
        original(copies, to_host(given), *args, **kwargs)
        for output, copy in zip(outputs, copies, strict=True):
            copy_back(output, copy)
        return Ended() if async_op else None

    return staged


def sending(original: Function) -> Function:
    return lambda tensor, *args, **kwargs: original(
        to_host(tensor) if is_staged(tensor) else tensor, *args, **kwargs
    )


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Ended]:
    """Starts all sends and receives. Returns when all messages have arrived."""
    sends, receives = [], []
    for operation in operations:
        arguments = {"group": operation.group, "tag": operation.tag}
        if operation.op is dist.isend:
            copy = to_host(operation.tensor)
            sends.append(Ended(dist.isend(copy, operation.peer, **arguments), copy))
        else:
            copy = empty_on_host(operation.tensor)
            receives.append((dist.irecv(copy, operation.peer, **arguments), copy, operation.tensor))
    for work, copy, tensor in receives:
        work.wait()
        copy_back(tensor, copy)
    return sends


# Wrapper -> names of functions. torch 2.13 has new names for the collectives of one tensor, and keeps the old
# names.
STAGED = {
    in_place: ("all_reduce", "broadcast", "reduce", "recv"),
    into_output: (
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
        *("all_gather_single", "reduce_scatter_single"),
    ),
    into_list: ("all_gather",),
    sending: ("send",),
}


def stage_collectives() -> None:
    """Replaces the functions of torch.distributed. Must run before megatron is imported, which may keep
    references to them."""
    for wrapper, names in STAGED.items():
        for name in names:
            if hasattr(dist, name):
                setattr(dist, name, wrapper(getattr(dist, name)))
    init = dist.init_process_group
    dist.batch_isend_irecv = batch_isend_irecv
    dist.init_process_group = lambda backend=None, **kwargs: init("gloo", **kwargs)
    dist.get_backend = lambda group=None: dist.Backend.NCCL


def main() -> None:
    stage_collectives()
    from megatron.cluster import processes

    processes.device_id = lambda *_: ""  # without ids, ranks may share a device
    script, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
