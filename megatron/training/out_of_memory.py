"""The error of a rank that cannot allocate memory: planned and measured memory, and the flags that reduce
it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator

from megatron.cluster.exit_codes import OutOfMemory
from megatron.config import Config
from megatron.planner.fit import memory_flags
from megatron.planner.stage_memory import planned_bytes
from megatron.planner.stages import StagePlan
from megatron.training.logging.peak_memory import local_memory

_GIB = 2**30
# Unused memory that the allocator has reserved, as a share of the device, from which it is fragmented.
_FRAGMENTED_SHARE = 0.1
# How errors that are not a torch.OutOfMemoryError describe an allocation that failed.
_MESSAGES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
)


@contextmanager
def explained_out_of_memory(
    config: Config, vocab_size: int, plan: StagePlan, pipeline_rank: int
) -> Iterator[None]:
    """Raises OutOfMemory for an allocation that fails in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(describe_out_of_memory(error, config, vocab_size, plan, pipeline_rank)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or in host memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(message in str(error) for message in _MESSAGES)


def describe_out_of_memory(
    error: BaseException, config: Config, vocab_size: int, plan: StagePlan, pipeline_rank: int
) -> str:
    """One sentence: the allocation, planned and measured memory of this rank, and flags with their planned
    memory."""
    planned = planned_bytes(config, vocab_size, plan)
    measured = local_memory()
    total = get_accelerator().total_memory()
    found = ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in measured.items())
    cause = str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
    flags = memory_flags(config, vocab_size, max(planned))
    remedy = ", ".join(f"{flag} ({size / _GIB:.2f} GiB planned)" for flag, size in flags)
    return (
        f"out of memory: {cause}; stage {pipeline_rank} is planned with {planned[pipeline_rank] / _GIB:.2f} "
        f"GiB (largest stage {max(planned) / _GIB:.2f} GiB), measured {found}, the device has "
        f"{total / _GIB:.2f} GiB; try {_fragmentation_hint(measured, total)}{remedy or 'more devices'}"
    )


def _fragmentation_hint(measured: dict[str, int], total: int) -> str:
    unused = measured.get("peak reserved", 0) - measured.get("peak allocated", 0)
    expandable = "expandable_segments" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if expandable or unused < _FRAGMENTED_SHARE * total:
        return ""
    return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (the memory is fragmented), "
