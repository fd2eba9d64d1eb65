"""tests/support/shared_gpu.py: collectives through host memory have the results of gloo's collectives.

tests/unit/test_gpu_script.py compares whole runs.
"""

from __future__ import annotations

import os
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import shared_gpu
from tests.support.pool import run_world

RANKS = 2


def arguments(name: str, views: bool) -> tuple[list[Tensor], list[object]]:
    """Returns the tensors that a collective writes, and its arguments. views: whether they are strided
    views."""

    def layout(x: Tensor) -> Tensor:
        return x.t().contiguous().t() if views else x

    given = layout(torch.arange(8.0).view(2, 4) + 100 * dist.get_rank())
    if name == "all_gather":
        outputs = [layout(torch.zeros(2, 4)) for _ in range(RANKS)]
        return outputs, [outputs, given]
    if name in ("all_reduce", "broadcast", "reduce"):
        return [given], [given] if name == "all_reduce" else [given, 0]
    rows = 2 * RANKS if "gather" in name else 2 // RANKS if "reduce" in name else 2
    output = layout(torch.zeros(rows, 4))
    return [output], [output, given]


def compare_collectives() -> list[str]:
    """Returns the names of the collectives whose results were compared."""
    compared = []
    for wrapper, names in shared_gpu.STAGED.items():
        for name in names:
            if name in ("send", "recv") or not hasattr(dist, name):
                continue
            expected, plain = arguments(name, views=False)
            getattr(dist, name)(*plain)
            for asynchronous in (False, True):
                found, words = arguments(name, views=True)
                work = wrapper(getattr(dist, name))(*words, async_op=asynchronous)
                assert not asynchronous or work.wait() and work.is_completed()
                # After `reduce` only rank 0 has a defined result.
                if name != "reduce" or dist.get_rank() == 0:
                    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
            compared.append(name)
    return compared


def exchange() -> tuple[float, float]:
    """Returns what a rank received by send and recv, and by batched messages."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    send, receive = shared_gpu.sending(dist.send), shared_gpu.in_place(dist.recv)
    single = torch.full((2, 3), float(rank)).t()
    if rank == 0:
        send(single, other)
        receive(single, other)
    else:
        got = torch.zeros(3, 2)
        receive(got, other)
        send(single, other)
        single = got
    batched = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), 10.0 + rank), other),
        dist.P2POp(dist.irecv, batched, other),
    ]
    for work in shared_gpu.batch_isend_irecv(operations):
        work.wait()
    return float(single.mean()), float(batched.mean())


def staged_collectives() -> tuple[list[str], tuple[float, float]]:
    with patch.dict(os.environ, {"STAGE_HOST_TENSORS": "1"}):
        return compare_collectives(), exchange()


def test_collectives_of_the_gpu_script_through_host_memory() -> None:
    (names, first), (_, second) = run_world(RANKS, staged_collectives)
    assert {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"} < set(names)
    assert (first, second) == ((1.0, 11.0), (0.0, 10.0))
