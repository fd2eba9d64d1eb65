"""Reports, once after the first steps, the memory of each pipeline stage and the bits of the moments.

The bits per element are read from the tensors and compared with the rule for 8-bit Adam.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.child_processes import status_bytes
from megatron.cluster.exit_codes import RunStopped
from megatron.mpu.parameters import spec_of
from megatron.mpu.world import gather_from_all_ranks
from megatron.optimizer.eight_bit import moment_bits
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.optimizer.quantized import BLOCK_SIZE, QuantizedMoment
from megatron.run import Run
from megatron.units import GIB


def memory_table(run: Run) -> str:
    """Returns a table with a row per pipeline rank: the minimum and maximum memory of its ranks, and the rank
    with the maximum. Collective.

    On an accelerator, the columns are the allocated, peak allocated and peak reserved memory of PyTorch's
    allocator, and on a GPU also all memory in use on the GPU. On a CPU, the columns are the memory of the
    process.
    """
    everywhere = gather_from_all_ranks((run.mesh.pp.rank, local_memory()))
    what = "stage" if run.config.parallel.stages_per_rank == 1 else "pipeline rank"
    lines = [f"memory after the first steps, GiB per {what}, least to most of its ranks:"]
    for place in range(run.mesh.pp_size):
        by_rank = {rank: found for rank, (stage, found) in enumerate(everywhere) if stage == place}
        lines.append(f"  {what} {place:3d} | {format_memory_row(by_rank)}")
    return "\n".join(lines)


def format_memory_row(by_rank: Mapping[int, Mapping[str, int]]) -> str:
    """Returns the columns of one pipeline rank. by_rank: global rank -> name -> bytes."""
    columns = []
    for name in next(iter(by_rank.values())):
        sizes = {rank: found[name] for rank, found in by_rank.items()}
        most = max(sizes, key=lambda rank: sizes[rank])
        columns.append(f"{name} {min(sizes.values()) / GIB:8.3f} to {sizes[most] / GIB:8.3f} (rank {most})")
    return " | ".join(columns)


def local_memory() -> dict[str, int]:
    """Returns name -> bytes of this process's memory."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return {"resident": status_bytes("VmRSS"), "peak resident": status_bytes("VmHWM")}
    found = {
        "allocated": accelerator.memory_allocated(),
        "peak allocated": accelerator.max_memory_allocated(),
        "peak reserved": accelerator.max_memory_reserved(),
    }
    if accelerator.device_name() == "cuda":
        # The memory in use includes memory that the allocator does not know: CUDA context, NCCL buffers,
        # other processes.
        free, total = torch.cuda.mem_get_info()
        found["device in use"] = total - free
    return found


@dataclass(frozen=True)
class MomentStorage:
    """The storage of a parameter's moments. expected_bits: bits per element according to the rule.
    actual_bits: bits per element of each tensor that holds moments. global_numel: number of elements of the
    unsharded parameter. local_numel, state_bytes: elements and bytes, summed over ranks including
    replicas."""

    expected_bits: int
    actual_bits: frozenset[int]
    global_numel: int
    local_numel: int
    state_bytes: int


def describe_moments(optimizer: MixedPrecisionOptimizer) -> str:
    """Returns a table of all parameters after the first optimizer step, grouped by the bits of their moments.

    Collective. Raises RunStopped with the name of a parameter on every rank if its moments break the rule.
    """
    merged: dict[str, MomentStorage] = {}
    for here in gather_from_all_ranks(local_moments(optimizer)):
        for name, part in here.items():
            merged[name] = _sum(merged[name], part) if name in merged else part
    for name, moments in merged.items():
        if moments.actual_bits != {moments.expected_bits}:
            found = " and ".join(str(bits) for bits in sorted(moments.actual_bits)) or "no"
            raise RunStopped(
                f"the moments of {name} have {found} bits per element, but the rule of --use-bnb-optimizer "
                f"expects {moments.expected_bits}: this is a bug in the program; remove --use-bnb-optimizer"
            )
    lines = ["moments after the first step:"]
    for bits in sorted({moments.expected_bits for moments in merged.values()}):
        lines += _rows(bits, {name: m for name, m in merged.items() if m.expected_bits == bits})
    return "\n".join(lines)


def local_moments(optimizer: MixedPrecisionOptimizer) -> dict[str, MomentStorage]:
    """Returns parameter name -> moments on this rank."""
    result = {}
    for flat in optimizer.flat:
        for parameter, start, length in flat.fragments():
            # Each moment has a tensor of elements and, if it is quantized, a tensor of scales.
            moments = [_tensors(m, start, length) for m in optimizer.moments_of(flat).values()]
            name, spec = optimizer.names[parameter], spec_of(parameter)
            result[name] = MomentStorage(
                expected_bits=moment_bits(name, spec),
                actual_bits=frozenset(8 * elements.element_size() for elements, *_ in moments),
                global_numel=math.prod(spec.global_shape),
                local_numel=length,
                state_bytes=sum(tensor.nbytes for moment in moments for tensor in moment),
            )
    return result


def _tensors(moment: Tensor | QuantizedMoment, start: int, length: int) -> tuple[Tensor, ...]:
    if isinstance(moment, QuantizedMoment):
        return moment.part(start, length)
    return (moment[start : start + length],)


def _sum(one: MomentStorage, other: MomentStorage) -> MomentStorage:
    return replace(
        one,
        actual_bits=one.actual_bits | other.actual_bits,
        local_numel=one.local_numel + other.local_numel,
        state_bytes=one.state_bytes + other.state_bytes,
    )


def _rows(bits: int, parameters: dict[str, MomentStorage]) -> list[str]:
    elements = sum(moments.global_numel for moments in parameters.values())
    held = sum(moments.local_numel for moments in parameters.values())
    per_element = sum(moments.state_bytes for moments in parameters.values()) / held
    blocks = f", in blocks of {BLOCK_SIZE}" if bits == 8 else ""
    head = (
        f"  {bits:2d} bits | {len(parameters):4,d} parameters | {elements:14,d} elements | "
        f"{per_element:.3f} bytes per element for both moments{blocks}"
    )
    names = textwrap.wrap(", ".join(_names_without_layer(parameters)), width=100, break_on_hyphens=False)
    return [head, *(f"          {line}" for line in names)]


def _names_without_layer(names: Iterable[str]) -> list[str]:
    """Returns texts of parameter names with * instead of the layer's number, and the number of layers that
    have this name."""
    counts = Counter(re.sub(r"^\d+\.", "*.", name) for name in names)
    return [f"{name} x {count}" if count > 1 else name for name, count in counts.items()]


# The memory is reported after this many steps. The first step creates the optimizer's state, so the second
# step has the peak memory.
_STEPS_BEFORE_MEMORY = 2


class StartupReport:
    """Decides when to print the reports. Counts the steps since the start of this process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._moments_pending = run.config.optimizer.use_bnb_optimizer
        self._steps_until_memory = _STEPS_BEFORE_MEMORY

    def lines(self, optimizer: MixedPrecisionOptimizer, is_last: bool) -> Iterator[str]:
        """Yields the texts to print after a step. Collective. is_last: whether the step is the last one of
        the run."""
        if self._moments_pending and not optimizer.skipped:
            self._moments_pending = False
            yield describe_moments(optimizer)
        if self._steps_until_memory > 0:
            self._steps_until_memory = 0 if is_last else self._steps_until_memory - 1
            if self._steps_until_memory == 0:
                yield memory_table(self._run)
