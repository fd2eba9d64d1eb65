"""The memory of each pipeline stage after the first steps."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.mpu.layout import ParallelLayout

_GIB = 2**30


def memory_table(layout: ParallelLayout, stages_per_rank: int, planned: Sequence[float]) -> str:
    """A row per pipeline rank: the least and the largest memory of its ranks, the rank of the largest, and
    the plan. Collective.

    On an accelerator allocated, peak allocated and peak reserved bytes of PyTorch's allocator; on a CPU the
    memory of the process. planned: bytes by pipeline rank, see `planned_bytes`.
    """
    everywhere: list[tuple[int, dict[str, int]]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(everywhere, (layout.pipeline_stage, local_memory()))
    what = "stage" if stages_per_rank == 1 else "pipeline rank"
    lines = [f"memory after the first steps, GiB per {what}, least to most of its ranks:"]
    for place, plan in enumerate(planned):
        by_rank = {rank: found for rank, (stage, found) in enumerate(everywhere) if stage == place}
        lines.append(f"  {what} {place:3d} | {format_memory_row(by_rank, plan)}")
    return "\n".join(lines)


def format_memory_row(by_rank: Mapping[int, Mapping[str, int]], planned: float) -> str:
    """The columns of one pipeline rank. by_rank: global rank -> name -> bytes."""
    columns = []
    for name in next(iter(by_rank.values())):
        sizes = {rank: found[name] for rank, found in by_rank.items()}
        most = max(sizes, key=lambda rank: sizes[rank])
        columns.append(f"{name} {min(sizes.values()) / _GIB:8.3f} to {sizes[most] / _GIB:8.3f} (rank {most})")
    return " | ".join([*columns, f"planned {planned / _GIB:8.3f}"])


def local_memory() -> dict[str, int]:
    """The memory of this process, in bytes: name -> value."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return {"resident": _status_bytes("VmRSS"), "peak resident": _status_bytes("VmHWM")}
    return {
        "allocated": accelerator.memory_allocated(),
        "peak allocated": accelerator.max_memory_allocated(),
        "peak reserved": accelerator.max_memory_reserved(),
    }


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status; without it the peak resident memory, which macOS gives in bytes and
    others in KiB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
