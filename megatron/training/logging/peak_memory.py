"""How much memory each pipeline stage takes, as its first steps have left it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.mpu.layout import ParallelLayout

_GIB = 2**30


def memory_table(layout: ParallelLayout, stages_per_rank: int = 1) -> str:
    """A row per pipeline rank, of its first process: tensor rank 0 of data rank 0. Collective.

    On an accelerator what PyTorch's allocator has handed out now, at most, and reserved at most; on a CPU the
    memory of the process. `stages_per_rank`: 2 with DualPipeV.
    """
    speaks = layout.tp_rank == 0 and layout.dp_rank == 0
    mine = (layout.pipeline_stage, local_memory()) if speaks else None
    everywhere: list[tuple[int, dict[str, int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    rows = sorted((row for row in everywhere if row is not None), key=lambda row: row[0])
    what = "stage" if stages_per_rank == 1 else "pipeline rank"
    lines = [f"memory after the first steps, GiB per {what}:"]
    for place, found in rows:
        values = " | ".join(f"{name} {size / _GIB:8.3f}" for name, size in found.items())
        lines.append(f"  {what} {place:3d} | {values}")
    return "\n".join(lines)


def local_memory() -> dict[str, int]:
    """Bytes by name, of this process."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return {"resident": _status_bytes("VmRSS"), "peak resident": _status_bytes("VmHWM")}
    return {
        "allocated": accelerator.memory_allocated(),
        "peak allocated": accelerator.max_memory_allocated(),
        "peak reserved": accelerator.max_memory_reserved(),
    }


def _status_bytes(field: str) -> int:
    """A field of Linux's table of this process; elsewhere the largest memory that the process has had,
    which macOS counts in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
