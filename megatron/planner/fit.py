"""Whether the planned memory fits a device, and the flags that reduce it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from megatron.cluster.devices import device_memory_bytes
from megatron.config import Config
from megatron.errors import UserError
from megatron.pipeline.stages import plan_stages
from megatron.planner.memory import StageMemory, planned_bytes
from megatron.training.out_of_memory import memory_flags
from megatron.units import GIB

# What a device needs beside the tensors of the plan: the CUDA context with the kernels of PyTorch and cuBLAS,
# and the buffers of NCCL's communicators, for which 0.5 to 0.7 GB each were published for A100s. Assumptions,
# never measured here.
CONTEXT_BYTES = GIB
COMMUNICATOR_BYTES = 600_000_000
# Memory that the allocator has reserved and cannot use, as a share of the plan, with expandable segments,
# which a run sets. Without them BigScience's logs of 2021 show 11 to 22 %.
FRAGMENTATION = 0.05
_MAX_FLAGS = 3
# A flag must reduce the planned memory by this share to be named.
_MIN_SAVING = 0.02


def communicators(config: Config) -> int:
    """NCCL's communicators of the rank that has most.

    One for each process group of several ranks: all ranks; tensor parallel; data parallel; pipeline parallel;
    model parallel (TP x PP); the two stages of the tied embedding. One for each neighbour in the pipeline.
    """
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sizes = (parallel.world_size, tensor, parallel.data_parallel_size, pipeline, tensor * pipeline)
    holders = parallel.rank_of_stage
    exchanges = {frozenset(pair) for pair in pairwise(holders)}
    pairs = [pair for pair in exchanges if len(pair) == 2]
    if not config.model.untie_embeddings_and_output_weights and holders[0] != holders[-1]:
        pairs.append(frozenset((holders[0], holders[-1])))
    most = max(sum(rank in pair for pair in pairs) for rank in holders)
    return sum(size > 1 for size in sizes) + most


def reserve_bytes(config: Config, planned: float) -> float:
    """Memory that a device needs beside `planned` bytes of tensors: see the constants of this module."""
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators(config) + FRAGMENTATION * planned


def spare_bytes(config: Config, planned: float) -> float | None:
    """What a rank with `planned` bytes of tensors leaves of the device of --gpu or --device-memory; negative
    if it does not fit. None without both."""
    device = device_memory_bytes(config)
    return None if device is None else device - planned - reserve_bytes(config, planned)


def fits(config: Config, planned: float) -> bool:
    """Whether a rank with `planned` bytes of tensors fits the device; any does if it is not known."""
    spare = spare_bytes(config, planned)
    return spare is None or spare >= 0


def fit_summary(config: Config, vocab_size: int, memory: Sequence[StageMemory]) -> tuple[bool, str]:
    """(whether the plan fits the device of --gpu or --device-memory, a sentence); (True, '') without both."""
    device = device_memory_bytes(config)
    if device is None:
        return True, ""
    planned = [part.total for part in memory]
    largest = max(planned)
    reserve = reserve_bytes(config, largest)
    name = config.training.gpu or f"{config.training.device_memory:g} GiB"
    needs = (
        f"stage {planned.index(largest)} needs {_gib(largest)} and a reserve of {_gib(reserve)} for CUDA, "
        f"NCCL ({communicators(config)} communicators) and the allocator, the device ({name}) has "
        f"{_gib(device)}"
    )
    spare = device - largest - reserve
    if fits(config, largest):
        return True, f"fits with {_gib(spare)} to spare: {needs}"
    over = [i for i, size in enumerate(planned) if not fits(config, size)]
    flags = ", ".join(
        f"{flag} ({_gib(size)}{', fits' if fits(config, size) else ''})"
        for flag, size in most_effective_flags(config, vocab_size, largest)
    )
    stages = f"stage {over[0]}" if len(over) == 1 else f"{len(over)} of {len(planned)} stages"
    return False, f"does not fit ({stages}), {_gib(-spare)} too much: {needs}; try {flags or 'more devices'}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def most_effective_flags(config: Config, vocab_size: int, planned: float) -> list[tuple[str, float]]:
    """The flags that reduce the planned memory of the largest stage most: (flag and value, planned bytes with
    it).

    planned: bytes now. At most three, in the order of their effect. They keep the model and the batches.
    """
    found = []
    for flag, changed in memory_flags(config):
        with suppress(UserError):
            size = max(planned_bytes(changed, vocab_size, plan_stages(changed, vocab_size)))
            if size < (1 - _MIN_SAVING) * planned:
                found.append((flag, size))
    return sorted(found, key=lambda entry: entry[1])[:_MAX_FLAGS]
