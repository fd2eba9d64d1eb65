"""The memory of each pipeline stage after the first steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.cluster.node_processes import status_bytes
from megatron.mpu.layout import ParallelLayout
from megatron.units import GIB


def memory_table(layout: ParallelLayout, stages_per_rank: int) -> str:
    """A row per pipeline rank: the least and the largest memory of its ranks, and the rank of the largest.
    Collective.

    On an accelerator allocated, peak allocated and peak reserved bytes of PyTorch's allocator, and on a GPU
    all bytes in use on it; on a CPU the memory of the process.
    """
    everywhere: list[tuple[int, dict[str, int]]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(everywhere, (layout.pipeline_stage, local_memory()))
    what = "stage" if stages_per_rank == 1 else "pipeline rank"
    lines = [f"memory after the first steps, GiB per {what}, least to most of its ranks:"]
    for place in range(layout.pp_size):
        by_rank = {rank: found for rank, (stage, found) in enumerate(everywhere) if stage == place}
        lines.append(f"  {what} {place:3d} | {format_memory_row(by_rank)}")
    return "\n".join(lines)


def format_memory_row(by_rank: Mapping[int, Mapping[str, int]]) -> str:
    """The columns of one pipeline rank. by_rank: global rank -> name -> bytes."""
    columns = []
    for name in next(iter(by_rank.values())):
        sizes = {rank: found[name] for rank, found in by_rank.items()}
        most = max(sizes, key=lambda rank: sizes[rank])
        columns.append(f"{name} {min(sizes.values()) / GIB:8.3f} to {sizes[most] / GIB:8.3f} (rank {most})")
    return " | ".join(columns)


def local_memory() -> dict[str, int]:
    """The memory of this process, in bytes: name -> value."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return {"resident": status_bytes("VmRSS"), "peak resident": status_bytes("VmHWM")}
    found = {
        "allocated": accelerator.memory_allocated(),
        "peak allocated": accelerator.max_memory_allocated(),
        "peak reserved": accelerator.max_memory_reserved(),
    }
    if accelerator.device_name() == "cuda":
        # With what the allocator does not know: the CUDA context, NCCL's buffers, other processes.
        free, total = torch.cuda.mem_get_info()
        found["device in use"] = total - free
    return found
